"""The device that a process computes on."""

import os

import torch

from rl_bridge.errors import ModelError

GPU_VARIABLE = "ROPEWALK_GPU"
"""The index of the GPU assigned to a process on another host (services/hosts.py). The shell that starts the process
(services/processes.py) sets CUDA_VISIBLE_DEVICES from it."""

GPUS_VARIABLE = "ROPEWALK_GPUS"
"""CUDA_VISIBLE_DEVICES as the worker had it before that."""

ALLOCATOR_VARIABLE = "ROPEWALK_ALLOC_CONF"
"""Default of PYTORCH_ALLOC_CONF, the settings of PyTorch's GPU allocator; the same shell sets that if it is unset."""


def allocator_environment(*, on_gpu: bool) -> dict[str, str]:
    """Return the allocator's environment variables for a training process, whose passes differ in size.

    Expandable segments avoid fragmentation. vLLM's processes do not use them: connectors that pin the key-value cache
    refuse such segments, vLLM's sleep turns them off, and memory shared between processes is opened more slowly.
    """
    return {ALLOCATOR_VARIABLE: "expandable_segments:True"} if on_gpu else {}


def own_device() -> torch.device:
    """Return the device of this process: its first GPU, or the CPU if none was assigned.

    Raises:
        ModelError: The assigned GPU does not exist. Falling back to the CPU would keep the run waiting in vain.
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
