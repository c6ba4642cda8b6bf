"""Where a process computes."""

import os

import torch

from rl_bridge.errors import ModelError

GPU_VARIABLE = "ROPEWALK_GPU"
"""Which GPU of its host a process has been given, in those on other hosts (services/hosts.py); the shell that starts
them (services/processes.py) makes CUDA_VISIBLE_DEVICES of it."""

GPUS_VARIABLE = "ROPEWALK_GPUS"
"""What that was before, as the worker was told it."""


def own_device() -> torch.device:
    """Where this process computes: its first GPU, or the CPU where it has been given none.

    Raises:
        ModelError: It has been given a GPU that is not there. On the CPU it would be waited for in vain.
    """
    if torch.cuda.is_available():
        return torch.device("cuda")
    if (gpu := os.environ.get(GPU_VARIABLE)) is not None:
        shown = os.environ.get(GPUS_VARIABLE) or "all there are"
        raise ModelError(
            f"expected a GPU at position {gpu} on {os.uname().nodename}, of those that its worker was shown ({shown}), "
            "got none; lower monarch.gpus_per_node to what each host has, or see `ropewalk doctor` there"
        )
    return torch.device("cpu")
