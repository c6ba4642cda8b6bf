"""Where a process computes."""

import os

import torch

from rl_bridge.errors import ModelError

GPU_VARIABLE = "ROPEWALK_GPU"
"""Which GPU of its host a process has been given, in those on other hosts (services/hosts.py); the shell that starts
them (services/processes.py) makes CUDA_VISIBLE_DEVICES of it."""

GPUS_VARIABLE = "ROPEWALK_GPUS"
"""What that was before, as the worker was told it."""

ALLOCATOR_VARIABLE = "ROPEWALK_ALLOC_CONF"
"""What PyTorch's allocator of GPU memory is told where nobody has told it anything, in the words of PYTORCH_ALLOC_CONF;
the same shell makes that of it."""


def allocator_environment(*, on_gpu: bool) -> dict[str, str]:
    """Variables of a process that trains, whose passes differ in size from step to step.

    Segments that grow leave no gaps between them. vLLM's processes do without: connectors that pin the key-value cache
    refuse such segments, its sleep turns them off, and memory that is shared between processes is opened more slowly.
    """
    return {ALLOCATOR_VARIABLE: "expandable_segments:True"} if on_gpu else {}


def own_device() -> torch.device:
    """Where this process computes: its first GPU, or the CPU where it has been given none.

    Raises:
        ModelError: It has been given a GPU that is not there. On the CPU it would be waited for in vain.
    """
    if torch.cuda.is_available():
        return torch.device("cuda")
    if (gpu := os.environ.get(GPU_VARIABLE)) is not None:
        visible = os.environ.get(GPUS_VARIABLE) or "all there are"
        raise ModelError(
            f"expected a GPU at position {gpu} on {os.uname().nodename}, of those that its worker was shown "
            f"({visible}), got none; lower monarch.gpus_per_node to what each host has, or see `ropewalk doctor` there"
        )
    return torch.device("cpu")
