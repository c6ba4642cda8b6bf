"""A plan: memory, broadcast and cost of a run, as far as what is known goes."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rl_bridge.config import Config, MonarchConfig, RoleConfig
from rl_bridge.errors import ConfigError
from rl_bridge.planning.memory import (
    KEPT_VERSIONS,
    ModelSize,
    RoleMemory,
    memory_of_roles,
    sent_bytes,
    trainer_bytes,
)
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
        trainer_bytes: What the trainer keeps for them, over all ranks.
        roles: Memory of each role; empty without a configuration.
        kept_bytes: What the trainer's hosts keep of the weights for their readers, in memory; None without a
            configuration.
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
    kept_bytes: int | None = None
    sent_bytes: float | None = None
    generators: int | None = None
    broadcasts: tuple[BroadcastPlan, ...] = ()
    fleet: RentedFleet | None = None
    decided: Mapping[str, Any] = field(default_factory=dict)

    def with_memory(self, size: ModelSize, config: Config | None) -> "RunPlan":
        """Add what each role keeps; without a configuration the trainer alone."""
        roles = () if config is None else tuple(memory_of_roles(config, size, _reward_model(config)))
        lora = None if config is None else config.model.lora
        adapters = None if lora is None else size.adapter_parameters(lora)
        return replace(
            self,
            parameters=size.parameters,
            adapters=adapters,
            trainer_bytes=trainer_bytes(size.parameters, adapters),
            roles=roles,
            kept_bytes=None if config is None else KEPT_VERSIONS * sent_bytes(size, config),
            decided={} if config is None else config.decided_by_gpus(),
        )

    def with_broadcasts(
        self, size_bytes: float, gbps: Sequence[float], rollout_s: float | None, config: Config | None
    ) -> "RunPlan":
        """Add how long so many bytes take at each bandwidth, and the idle share beside so long a rollout."""
        links = None if config is None else _links_of(config.monarch)

        def at(bandwidth: float) -> BroadcastPlan:
            one = size_bytes * 8 / (bandwidth * 1e9)
            every = None
            if links is not None:
                # Each generator fetches a version from the trainer's hosts, each of which has its share of it; and a
                # host takes as many copies as it has generators.
                receivers, senders, most_on_one_host = links
                every = one * max(receivers / senders, most_on_one_host)
            taken = one if every is None else every
            idle = None if rollout_s is None else taken / (taken + rollout_s)
            return BroadcastPlan(gbps=bandwidth, seconds=one, all_seconds=every, idle=idle)

        return replace(
            self,
            sent_bytes=size_bytes,
            generators=None if links is None else links[0],
            broadcasts=tuple(at(each) for each in gbps),
        )

    def with_fleet(self, fleet: RentedFleet) -> "RunPlan":
        """Add what is rented."""
        return replace(self, fleet=fleet)

    def as_json(self, *, gpu_gb: float | None = None) -> dict[str, Any]:
        """This as what JSON can hold.

        Args:
            gpu_gb: Memory of one GPU, in GB, to say what does not fit; None says nothing of it.
        """
        told = asdict(replace(self, roles=(), fleet=None))
        told["roles"] = [
            {
                "role": role.role,
                "replicas": role.replicas,
                "processes": role.processes,
                "bytes": {**role.parts, **role.per_process},
                "process_bytes": role.process_bytes,
                "at_best": dict(role.at_best),
                "gpu_share": role.gpu_share,
                **({} if gpu_gb is None else {"fits": role.fits(gpu_gb * 1e9)}),
            }
            for role in self.roles
        ]
        if self.fleet is not None:
            fleet = self.fleet
            told["fleet"] = asdict(fleet) | {
                "spot_cost": fleet.spot_cost,
                "on_demand_cost": fleet.on_demand_cost,
                "cost": fleet.cost,
                "all_on_demand": fleet.all_on_demand,
                "saved_share": fleet.saved_share,
            }
        return told


def policy_size(config: Config) -> ModelSize:
    """How large the policy of a run is.

    Raises:
        ConfigError: The run's task makes it.
        ModelError: The checkpoint does not say.
    """
    if config.model.path is None:
        raise ConfigError("expected model.path or --parameters, to know how large the policy is; got neither")
    return ModelSize.of_folder(Path(config.model.path).expanduser())


def gpus_of(config: Config) -> tuple[int, int]:
    """GPUs of a run that may be taken away, and those that may not.

    With `rollout.spot_eligible` the generators' may, and none otherwise: trainer, reference and reward model are what
    a run cannot go on without.
    """
    everything, policy = config.monarch.gpus, config.monarch.roles.policy
    lost_alone = config.rollout.spot_eligible and not config.monarch.colocate
    spot = policy.replicas * policy.gpus if lost_alone else 0
    return spot, everything - spot


def _links_of(monarch: MonarchConfig) -> tuple[int, int, int]:
    """The generators, the hosts that they fetch from, and the most generators on one host.

    With TorchStore the one sender is the controller's host, where its volume is.
    """
    senders = 1 if monarch.transport == "torchstore" else monarch.roles.trainer.hosts
    return monarch.roles.policy.replicas, senders, _most_on_one_host(monarch)


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
