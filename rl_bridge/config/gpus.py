"""`trainer.num_gpus`, the short way to say where a run computes: what it puts where the role table says nothing."""

import math

from rl_bridge.config.monarch import MonarchConfig, RoleConfig


def monarch_by_gpus(
    num_gpus: int, monarch: MonarchConfig, *, num_workers: int, reference: bool, tensor_parallel: int = 1
) -> MonarchConfig:
    """The mesh with what `trainer.num_gpus` implies.

    The trainer gets a rank a GPU, over as few hosts as have them. With 0 it computes on the CPU, and so does
    whatever else the table leaves open. Otherwise the reference gets a GPU where there is one, and the generators
    one each, or `generator.tensor_parallel`: as many generators as there are rollout workers, or as the cluster has
    GPUs left for. Where it has none left, and nobody said otherwise, generators are colocated, on the trainer's GPUs.

    Args:
        num_gpus: The key's value.
        monarch: The cluster, and the table as it was given; a role that it gives stays as it is.
        num_workers: Rollout workers.
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
        there, colocate = monarch.num_nodes * monarch.gpus_per_node, monarch.colocate
        left = there - given.model_copy(update=roles).gpus() + tensor_parallel
        if there and left < tensor_parallel and colocate is False:
            besides = (
                " beside one for the reference model (algorithm.kl_coef)" if "reference" in roles else ""
            )
            raise ValueError(
                f"expected trainer.num_gpus to leave {'a GPU' if tensor_parallel == 1 else tensor_parallel} to a "
                f"generator, got {num_gpus}{besides} of the {there} GPUs "
                "of monarch.num_nodes x gpus_per_node; have them take turns by monarch.colocate=true, give the trainer "
                "fewer, or the generators a place by monarch.roles.policy"
            )
        if colocate or (there and left < tensor_parallel):
            replicas, colocate = max(1, num_gpus // tensor_parallel), True
        else:
            replicas = min(num_workers, left // tensor_parallel) if there else num_workers
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
