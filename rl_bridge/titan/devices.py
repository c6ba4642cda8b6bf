"""Where a model computes. Imported before TorchTitan's modules."""

import torch
import torchtitan.tools.utils as titan_utils

# TorchTitan takes a machine without an accelerator for one with CUDA; its modules read this on import.
if not torch.cuda.is_available():
    titan_utils.device_type, titan_utils.device_module = "cpu", torch.cpu


def own_device() -> torch.device:
    """Where this process computes: its first GPU, or the CPU where there is none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
