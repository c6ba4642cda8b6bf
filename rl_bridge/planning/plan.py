"""A plan: memory, broadcast and cost of a run, as far as what is known goes."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rl_bridge.config import Config, MonarchConfig, RoleConfig
from rl_bridge.planning.memory import TRAINER_BYTES, ModelSize, RoleMemory, memory_of_roles
from rl_bridge.services.options import Placement, ServiceOptions, by_need


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


@dataclass(kw_only=True, slots=True, frozen=True)
class BroadcastPlan:
    """How long new weights take at one bandwidth.

    Attributes:
        gbps: The bandwidth.
        seconds: Until one generator has them, if it is the only one.
        all_seconds: Until all have them; None without a configuration.
        idle: The generators' idle share in a synchronous loop; None where nobody said how long they work.
    """

    gbps: float
    seconds: float
    all_seconds: float | None
    idle: float | None


@dataclass(kw_only=True, slots=True, frozen=True)
class RunPlan:
    """What is known of a run before it begins.

    Attributes:
        parameters: Of the policy.
        adapters: Of its adapters; None where all parameters are trained.
        trainer_bytes: What the trainer keeps for them between steps, over all its ranks.
        roles: Memory of each role; empty without a configuration.
        sent_bytes: What a version of the weights takes on the network, for each generator.
        generators: How many there are; None without a configuration.
        broadcasts: One a bandwidth.
        fleet: What is rented; None without prices.
        decided: Keys that GPUs decide unless somebody sets them, and what they are; empty without a configuration.
    """

    parameters: int | None = None
    adapters: int | None = None
    trainer_bytes: int | None = None
    roles: tuple[RoleMemory, ...] = ()
    sent_bytes: float | None = None
    generators: int | None = None
    broadcasts: tuple[BroadcastPlan, ...] = ()
    fleet: RentedFleet | None = None
    decided: Mapping[str, Any] = field(default_factory=dict)

    def with_memory(self, size: ModelSize, config: Config | None) -> "RunPlan":
        """Add what each role keeps; without a configuration the trainer alone."""
        roles = () if config is None else tuple(memory_of_roles(config, size, _reward_model(config)))
        kept = TRAINER_BYTES * size.parameters
        if roles:
            kept = sum(held for name, held in roles[0].parts.items() if name != "critic")
        lora = None if config is None else config.model.lora
        adapters = None if lora is None else size.adapter_parameters(lora)
        return replace(
            self,
            parameters=size.parameters,
            adapters=adapters,
            trainer_bytes=kept,
            roles=roles,
            decided={} if config is None else config.decided_by_gpus(),
        )

    def with_broadcasts(
        self, size_bytes: float, gbps: Sequence[float], rollout_s: float | None, config: Config | None
    ) -> "RunPlan":
        """Add how long so many bytes take at each bandwidth, and the idle share beside so long a rollout.

        Each generator fetches a version from the trainer's hosts, each of which has its share of it; with TorchStore
        from the controller's. A host takes as many copies as it has generators.
        """
        receivers, times = None, 1.0
        if config is not None:
            monarch = config.monarch
            receivers = monarch.roles.policy.replicas
            senders = 1 if monarch.transport == "torchstore" else monarch.roles.trainer.hosts
            times = max(receivers / senders, _most_on_one_host(monarch))
        found = []
        for bandwidth in gbps:
            one = size_bytes * 8 / (bandwidth * 1e9)
            idle = None if rollout_s is None else times * one / (times * one + rollout_s)
            every = None if receivers is None else times * one
            found.append(BroadcastPlan(gbps=bandwidth, seconds=one, all_seconds=every, idle=idle))
        return replace(self, sent_bytes=size_bytes, generators=receivers, broadcasts=tuple(found))

    def as_json(self, *, gpu_gb: float | None = None) -> dict[str, Any]:
        """This as what JSON can hold.

        Args:
            gpu_gb: Memory of one GPU, in GB, to say what does not fit; None says nothing of it.
        """
        told = asdict(self)
        for row, role in zip(told["roles"], self.roles, strict=True):
            row["process_bytes"] = role.process_bytes
            if gpu_gb is not None:
                row["fits"] = role.fits(gpu_gb * 1e9)
        if self.fleet is not None:
            derived = ("spot_cost", "on_demand_cost", "cost", "all_on_demand", "saved_share")
            told["fleet"] |= {name: getattr(self.fleet, name) for name in derived}
        return told


def gpus_of(config: Config) -> tuple[int, int]:
    """GPUs of a run that may be taken away, and those that may not.

    With `rollout.spot_eligible` the generators' may, and none otherwise: trainer, reference and reward model are what
    a run cannot go on without.
    """
    everything, policy = config.monarch.gpus, config.monarch.roles.policy
    lost_alone = config.rollout.spot_eligible and not config.monarch.colocate
    spot = policy.replicas * policy.gpus if lost_alone else 0
    return spot, everything - spot


def _most_on_one_host(monarch: MonarchConfig) -> int:
    """Of the generators, as the run itself would place them, beside a trainer that has its place first."""
    if not (monarch.gpus_per_node and monarch.roles.policy.gpus):
        # Any host will do, or the file does not say yet what there is.
        return math.ceil(monarch.roles.policy.replicas / monarch.num_nodes)
    placement, on = Placement(monarch.num_nodes, monarch.gpus_per_node), Counter[int]()
    roles = {
        name: _room(getattr(monarch.roles, name), name if monarch.colocate else "")
        for name in ("trainer", "policy")
    }
    for name in by_need(roles):
        for _ in range(getattr(monarch.roles, name).replicas):
            slot = placement.take(roles[name], 0.0)
            if name == "policy":
                on[slot.first] += 1
    return max(on.values())


def _room(role: RoleConfig, shares: str) -> ServiceOptions:
    return ServiceOptions(
        procs=role.procs,
        hosts=role.hosts,
        with_gpus=role.gpus > 0,
        gpus_per_proc=max(1, role.gpus // (role.procs * role.hosts)),
        gpu_pool=shares,
    )


def _reward_model(config: Config) -> ModelSize | None:
    path = config.reward.model
    return None if path is None else ModelSize.of_folder(Path(path).expanduser())
