"""What GPUs cost where some may be taken away at any time, at prices that the user brings."""

from dataclasses import dataclass


@dataclass(kw_only=True, slots=True, frozen=True)
class RentedFleet:
    """GPUs and their prices, in whatever currency.

    Attributes:
        spot_gpus: Those that may be taken away: generators, whose work others take over.
        on_demand_gpus: The others: the trainer, whose loss would stop the run.
        spot_price: Of one spot GPU an hour.
        on_demand_price: Of one of the others an hour.
        spot_kind_on_demand_price: What a GPU of the spot kind costs on demand, which is what a saving is against; the
            same as `on_demand_price` where all are of one kind.
        hours: How long all are rented.
    """

    spot_gpus: int
    on_demand_gpus: int
    spot_price: float
    on_demand_price: float
    spot_kind_on_demand_price: float
    hours: float

    @property
    def spot_cost(self) -> float:
        """Of the spot GPUs."""
        return self.spot_gpus * self.spot_price * self.hours

    @property
    def on_demand_cost(self) -> float:
        """Of the others."""
        return self.on_demand_gpus * self.on_demand_price * self.hours

    @property
    def cost(self) -> float:
        """Of all."""
        return self.spot_cost + self.on_demand_cost

    @property
    def all_on_demand(self) -> float:
        """What the same GPUs would cost if none could be taken away."""
        return self.spot_gpus * self.spot_kind_on_demand_price * self.hours + self.on_demand_cost

    @property
    def saved_share(self) -> float:
        """How much less that is than all on demand, from 0 to 1; 0 where nothing costs anything."""
        return 1.0 - self.cost / self.all_on_demand if self.all_on_demand else 0.0
