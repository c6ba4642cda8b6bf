"""What the GPUs that a run computes on decide: the role table, and what `auto` stands for."""

import logging
import math
import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator

from rl_bridge.config.monarch import MonarchConfig, RoleConfig

logger = logging.getLogger(__name__)


def _whole_name(dtype: object) -> object:
    return {"bf16": "bfloat16", "fp32": "float32"}.get(dtype, dtype) if isinstance(dtype, str) else dtype


Dtype = Annotated[Literal["auto", "float32", "bfloat16"], BeforeValidator(_whole_name)]
"""What weights are computed in; bf16 and fp32 for short, auto as `dtype_on` says."""


def dtype_on(dtype: Dtype, gpus: int) -> Dtype:
    """What auto stands for: bfloat16 with GPUs, float32 without."""
    if dtype != "auto":
        return dtype
    return "bfloat16" if gpus else "float32"


def monarch_by_gpus(
    num_gpus: int,
    monarch: MonarchConfig,
    *,
    num_workers: int | None,
    reference: bool,
    tensor_parallel: int = 1,
) -> MonarchConfig:
    """The mesh with what `trainer.num_gpus` implies.

    The trainer gets a rank a GPU, over as few hosts as have them. With 0 it computes on the CPU, and so does
    whatever else the table leaves open. Otherwise the reference gets a GPU where there is one, and the generators
    one each, or `tensor_parallel`: as many generators as there are GPUs left for, and no more than rollout workers
    where somebody has said how many of those. The GPUs are those of `monarch`; where it names none, and no other hosts,
    those of this machine; and where these do not do, nobody knows: there is a generator a worker. Where none is left,
    and nobody said otherwise, generators are colocated, on the trainer's GPUs.

    Args:
        num_gpus: The key's value.
        monarch: The cluster, and the table as it was given; a role that it gives stays as it is.
        num_workers: Rollout workers; None where nobody has said how many.
        reference: Whether the run has a reference model.
        tensor_parallel: GPUs of a generator.

    Raises:
        ValueError: The table gives the trainer another number of GPUs, the trainer's cannot be shared out evenly over
            hosts, or none is left for a generator.
    """
    given = monarch.roles
    roles: dict[str, RoleConfig] = {"trainer": _trainer(num_gpus, monarch)}
    if num_gpus:
        if reference:
            roles["reference"] = RoleConfig(gpus=1)
        roles["policy"] = RoleConfig(gpus=tensor_parallel)
    roles = {name: role for name, role in roles.items() if name not in given.model_fields_set}
    if "policy" in roles:
        colocate = monarch.colocate
        there, used = monarch.num_nodes * monarch.gpus_per_node, given.model_copy(update=roles).gpus()
        if not there and monarch.alone and (here := len(visible_gpus())) >= used:
            there = here
        left = (there - used + tensor_parallel) // tensor_parallel
        if there and left < 1 and colocate is False:
            besides = (
                " beside one for the reference model (algorithm.kl_coef)" if "reference" in roles else ""
            )
            raise ValueError(
                f"expected trainer.num_gpus to leave {'a GPU' if tensor_parallel == 1 else tensor_parallel} to a "
                f"generator, got {num_gpus}{besides} of the {there} GPUs "
                "of monarch.num_nodes x gpus_per_node; have them take turns by monarch.colocate=true, give the trainer "
                "fewer, or the generators a place by monarch.roles.policy"
            )
        if colocate or (there and left < 1):
            replicas, colocate = max(1, num_gpus // tensor_parallel), True
        else:
            wanted = left if num_workers is None else num_workers
            replicas = min(wanted, left) if there else num_workers or 1
        roles["policy"] = RoleConfig(replicas=replicas, gpus=tensor_parallel)
        monarch = monarch.model_copy(update={"colocate": colocate})
    return monarch.with_roles(given.model_copy(update=roles), colocate=monarch.colocate)


def _trainer(num_gpus: int, monarch: MonarchConfig) -> RoleConfig:
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
    """What the GPUs of this machine are called: those of CUDA_VISIBLE_DEVICES, or of the driver."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return _named(given)
    return tuple(str(number) for number in range(len(list(Path("/dev").glob("nvidia[0-9]*")))))


def _named(devices: str) -> tuple[str, ...]:
    """What CUDA makes of its variable: it stops at what is no device, as -1; where one is named twice it shows none."""
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
