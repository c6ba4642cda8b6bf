"""`monarch.*`: a run's processes, their hosts and GPUs, and what happens when one is lost."""

import logging
import math
import os
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from rl_bridge.config.sections import Count, NonNegative, Port, Seconds, Section


class ReplicaRange(Section):
    """Replicas that grow with the hosts that join the run (`monarch.join_port`)."""

    min: Count = 1
    """With as many a run starts, and can go on."""
    max: Count
    """Up to as many are started on hosts that join: one for the GPUs of each, or one a host without."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"expected min of at most max, got {self.min} and {self.max}")
        return self


def min_of(replicas: int | ReplicaRange) -> int:
    """Return the number of replicas with which a run starts, and can go on."""
    return replicas.min if isinstance(replicas, ReplicaRange) else replicas


class RoleConfig(Section):
    """One row of the role table."""

    replicas: Count | ReplicaRange = 1
    """Number of replicas, or `{min, max}`; each serves by itself."""
    procs: Count = 1
    """Processes per replica on each of its hosts: the trainer's ranks, for example."""
    hosts: Count = 1
    """Hosts per replica."""
    gpus: Annotated[int, Field(ge=0)] = 0
    """GPUs per replica; 0 computes on the CPU."""

    @property
    def min_replicas(self) -> int:
        """See `min_of`."""
        return min_of(self.replicas)

    @property
    def max_replicas(self) -> int:
        """The number of replicas up to which hosts that join add some."""
        return self.replicas.max if isinstance(self.replicas, ReplicaRange) else self.replicas

    @property
    def ranks(self) -> int:
        """Processes of a replica on all of its hosts."""
        return self.procs * self.hosts


class CoderConfig(RoleConfig):
    """`monarch.roles.coder`: servers that run code for reward functions and tasks."""

    app: str = "envs.code_interpreter_env.server.app:app"
    """The application that they serve."""


class RolesConfig(Section):
    """`monarch.roles.*`: the role table."""

    policy: RoleConfig = RoleConfig()
    trainer: RoleConfig = RoleConfig()
    reference: RoleConfig = RoleConfig()
    opponent: RoleConfig = RoleConfig()
    """Generators of earlier versions and other checkpoints, which play seats of a game (`env.seats`)."""
    reward: RoleConfig = RoleConfig()
    environment: RoleConfig = RoleConfig()
    """Servers of `env.app` or `env.image`; they run on the controller's host, or where `env.fleet` says."""
    coder: CoderConfig | None = None
    """These run on the controller's host too; `rl_bridge.environments.servers.coder_urls()` returns their addresses."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in ("trainer", "reference", "reward"):  # the policy's depend on generator.tensor_parallel
            role: RoleConfig = getattr(self, name)
            if role.gpus not in (0, role.ranks):
                raise ValueError(
                    f"expected monarch.roles.{name}.gpus to be 0 or one a process, {role.ranks}, "
                    f"got {role.gpus}" + ("; set procs to as many" if name != "reward" else "")
                )
        if self.trainer.replicas != 1:
            raise ValueError(
                f"expected monarch.roles.trainer.replicas of 1, got {self.trainer.replicas}; "
                "more ranks are monarch.roles.trainer.procs"
            )
        for name in ("policy", "reward", "opponent"):
            role = getattr(self, name)
            if role.ranks != 1:
                raise ValueError(
                    f"expected monarch.roles.{name} with one process a replica, "
                    f"got procs={role.procs} and hosts={role.hosts}; more of it are replicas"
                )
        for name in ("environment", "coder"):
            servers: RoleConfig | None = getattr(self, name)
            if servers is not None and isinstance(servers.replicas, ReplicaRange):
                raise ValueError(
                    f"expected monarch.roles.{name}.replicas to be a number: they stay on the controller's host"
                )
            if servers is not None and (servers.procs, servers.hosts, servers.gpus) != (1, 1, 0):
                raise ValueError(
                    f"expected monarch.roles.{name} with one process a replica, on one host without GPUs, "
                    f"got procs={servers.procs}, hosts={servers.hosts}, gpus={servers.gpus}; more of it are replicas"
                )
        return self

    def gpus(self) -> int:
        """Return the number of GPUs that all roles use together."""
        return sum(self._gpus_by_role())

    def max_role_gpus(self) -> int:
        """Return the number of GPUs of the role that uses most."""
        return max(self._gpus_by_role())

    def _gpus_by_role(self) -> list[int]:
        return [
            role.min_replicas * role.gpus
            for role in (self.policy, self.trainer, self.reference, self.reward, self.opponent)
        ]


class RestartPolicy(Section):
    """`monarch.restarts.*`: how often a lost replica is restarted."""

    budget: Annotated[int, Field(ge=0)] = 3
    """Restarts of one replica within `window_s`; one more loss ends the run."""
    window_s: Seconds = 600.0
    backoff_s: NonNegative = 0.5
    """The wait before the first restart; doubles with each further one in the window."""
    max_backoff_s: NonNegative = 30.0

    @model_validator(mode="after")
    def _check_backoff(self) -> Self:
        if self.backoff_s > self.max_backoff_s:
            raise ValueError(
                "expected monarch.restarts.backoff_s of at most monarch.restarts.max_backoff_s, "
                f"got {self.backoff_s:g} and {self.max_backoff_s:g}"
            )
        return self


class MonarchConfig(Section):
    """`monarch.*`: the mesh."""

    heartbeat_interval: Seconds = 1.0
    """Seconds between checks whether a process is alive: about how late a death is noticed."""
    start_timeout_s: Seconds = 600.0
    """How long a replica may take from the start of its process to its first call: it loads the model, and a generator
    that joins later fetches the weights. With `colocate`, `trainer.timeout_s` is added, as another role may have its
    turn first."""
    roles: RolesConfig = RolesConfig()
    restarts: RestartPolicy = RestartPolicy()
    colocate: bool | None = None
    """Trainer and generators take turns on the same GPUs: generators sleep while the trainer works, and its weights and
    moments are in host memory otherwise. Unset, this is done if there are too few GPUs for both."""
    workers: tuple[str, ...] = ()
    """Addresses of other hosts' workers, such as `tcp://10.0.0.2:26600`; with none, everything runs on this machine."""
    job: str | None = None
    """A function that makes a Monarch job, as `package.module:function`: a SlurmJob or KubernetesJob with a mesh
    `hosts`."""
    cpu_mesh: str | None = None
    """Another mesh of that job, with hosts without GPUs: roles that need no GPU are placed there while one of its hosts
    is reachable. `num_nodes` and `gpus_per_node` describe `hosts`."""
    transport: Literal["auto", "shared_memory", "cuda_ipc", "rdma", "torchstore"] = "auto"
    """How weights are sent; auto is shared memory on this machine, and RDMA (or TCP, if there is none) between hosts.
    `cuda_ipc` leaves them on a GPU that trainer and generator take turns on (`colocate`)."""
    master_addr: str = "127.0.0.1"
    """The controller's address: where the status is served, and what other hosts connect to."""
    master_port: Port = 29500
    """The controller's port for traffic of the mesh, if there are other hosts."""
    join_port: Port | None = None
    """The port at `master_addr` where further hosts join the run (`python -m rl_bridge.services.worker --join`); with
    none, no host can join."""
    preemption_notice_file: str | None = None
    """A file on hosts that have joined: when it appears, the host is about to be taken away, and leaves in order."""
    coord_port: Port = 0
    """The port of the status; 0 takes a free one. `ropewalk status` finds it by the run's folder."""
    num_nodes: Count = 1
    """Number of hosts with GPUs; more than one requires `workers` or `job`."""
    gpus_per_node: Annotated[int, Field(ge=0)] = 0
    """GPUs on each of them."""

    @model_validator(mode="after")
    def _check_cluster(self) -> Self:
        if self.workers and self.job is not None:
            raise ValueError("expected monarch.workers or monarch.job, got both")
        if self.transport == "cuda_ipc" and not self.is_local:
            raise ValueError(
                "expected no monarch.workers, job or join_port with monarch.transport=cuda_ipc, by which a GPU's "
                "memory is read on its own machine alone; use rdma"
            )
        if self.cpu_mesh is not None and self.job is None:
            raise ValueError("expected monarch.cpu_mesh with monarch.job, whose mesh it is, got it alone")
        _check_gpu_count(self)
        return self

    @property
    def gpus(self) -> int:
        """GPUs that the roles use together; colocated, those of the role that uses most."""
        return self.roles.max_role_gpus() if self.colocate else self.roles.gpus()

    @property
    def is_local(self) -> bool:
        """Whether all processes are on the controller's machine, and stay there."""
        return not self.workers and self.job is None and self.join_port is None

    def with_roles(self, roles: RolesConfig, *, colocate: bool | None) -> Self:
        """Return the configuration with another role table; ValueError if its GPUs are more than there are."""
        changed = self.model_copy(update={"roles": roles, "colocate": colocate})
        _check_gpu_count(changed)
        return changed


def _check_gpu_count(monarch: MonarchConfig) -> None:
    available, used = monarch.num_nodes * monarch.gpus_per_node, monarch.gpus
    if available and used > available:
        raise ValueError(
            f"expected monarch.roles to use at most the {available} GPUs of num_nodes x gpus_per_node, got {used}"
        )


logger = logging.getLogger(__name__)


def _expand_dtype(dtype: object) -> object:
    return {"bf16": "bfloat16", "fp32": "float32"}.get(dtype, dtype) if isinstance(dtype, str) else dtype


Dtype = Annotated[Literal["auto", "float32", "bfloat16"], BeforeValidator(_expand_dtype)]
"""The dtype to compute in; bf16 and fp32 are short forms, and `resolve_dtype` resolves auto."""


def resolve_dtype(dtype: Dtype, gpus: int) -> Dtype:
    """Resolve "auto" to bfloat16 with GPUs and float32 without."""
    if dtype != "auto":
        return dtype
    return "bfloat16" if gpus else "float32"


def derive_monarch(
    num_gpus: int,
    monarch: MonarchConfig,
    *,
    num_workers: int | None,
    reference: bool,
    opponent: bool = False,
    tensor_parallel: int = 1,
) -> MonarchConfig:
    """Return the mesh with the roles that `trainer.num_gpus` implies; roles given in the table are kept.

    The trainer gets one rank per GPU, on as few hosts as possible. With 0 GPUs it computes on the CPU, and so does
    every role that the table omits. Otherwise the reference model, if any, gets one GPU, and each generator
    `tensor_parallel` GPUs, that of opponents too. There are as many generators as remaining GPUs allow, and at most
    `num_workers` if that is set. GPUs are counted by `monarch`, or if it names none and no other hosts, on this
    machine; if these are too few, the number is taken as unknown, and there is one generator per worker. If no GPU
    remains, generators are colocated on the trainer's GPUs, unless `monarch.colocate` is false.

    Raises:
        ValueError: The table gives the trainer another number of GPUs, the trainer's GPUs cannot be divided evenly over
            its hosts, or none is left for a generator.
    """
    configured = monarch.roles
    roles: dict[str, RoleConfig] = {"trainer": _make_trainer_role(num_gpus, monarch)}
    if num_gpus:
        if reference:
            roles["reference"] = RoleConfig(gpus=1)
        if opponent:
            roles["opponent"] = RoleConfig(gpus=tensor_parallel)
        roles["policy"] = RoleConfig(gpus=tensor_parallel)
    roles = {name: role for name, role in roles.items() if name not in configured.model_fields_set}
    if "policy" in roles:
        colocate = monarch.colocate
        available = monarch.num_nodes * monarch.gpus_per_node
        used = configured.model_copy(update=roles).gpus()
        if not available and monarch.is_local and (visible := len(visible_gpus())) >= used:
            available = visible
        replicas_left = (available - used + tensor_parallel) // tensor_parallel
        if available and replicas_left < 1 and colocate is False:
            reference_note = (
                " beside one for the reference model (algorithm.kl_coef)" if "reference" in roles else ""
            )
            raise ValueError(
                f"expected trainer.num_gpus to leave {'a GPU' if tensor_parallel == 1 else tensor_parallel} to a "
                f"generator, got {num_gpus}{reference_note} of the {available} GPUs "
                "of monarch.num_nodes x gpus_per_node; have them take turns by monarch.colocate=true, give the trainer "
                "fewer, or the generators a place by monarch.roles.policy"
            )
        if colocate or (available and replicas_left < 1):
            replicas, colocate = max(1, num_gpus // tensor_parallel), True
        else:
            num_replicas = replicas_left if num_workers is None else num_workers
            replicas = min(num_replicas, replicas_left) if available else num_workers or 1
        roles["policy"] = RoleConfig(replicas=replicas, gpus=tensor_parallel)
        monarch = monarch.model_copy(update={"colocate": colocate})
    return monarch.with_roles(configured.model_copy(update=roles), colocate=monarch.colocate)


def _make_trainer_role(num_gpus: int, monarch: MonarchConfig) -> RoleConfig:
    if "trainer" in monarch.roles.model_fields_set:
        if monarch.roles.trainer.gpus != num_gpus:
            raise ValueError(
                f"expected trainer.num_gpus as monarch.roles.trainer.gpus says, {monarch.roles.trainer.gpus}, "
                f"got {num_gpus}; leave one of them out, or change both: the file of a saved run has both "
                f"(monarch.roles.trainer={{procs: {max(1, num_gpus)}, gpus: {num_gpus}}})"
            )
        return monarch.roles.trainer
    hosts = max(1, math.ceil(num_gpus / (monarch.gpus_per_node or max(num_gpus, 1))))
    if num_gpus % hosts:
        raise ValueError(
            f"expected trainer.num_gpus to fill each of its {hosts} hosts equally, got {num_gpus} with "
            f"monarch.gpus_per_node of {monarch.gpus_per_node}"
        )
    return RoleConfig(procs=max(1, num_gpus // hosts), hosts=hosts, gpus=num_gpus)


def visible_gpus() -> tuple[str, ...]:
    """Return the names of this machine's GPUs: those in CUDA_VISIBLE_DEVICES, or all of the driver's."""
    devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    if devices is not None:
        return _parse_devices(devices)
    return tuple(str(number) for number in range(len(list(Path("/dev").glob("nvidia[0-9]*")))))


def _parse_devices(devices: str) -> tuple[str, ...]:
    """Parse CUDA_VISIBLE_DEVICES as CUDA does: it stops at an invalid device such as -1; a duplicate hides all GPUs."""
    names: list[str] = []
    for name in map(str.strip, devices.split(",")):
        if not name or name.startswith("-"):
            break
        if name in names:
            logger.warning(
                "CUDA_VISIBLE_DEVICES=%s names a GPU twice, so that CUDA shows none at all", devices
            )
            return ()
        names.append(name)
    return tuple(names)
