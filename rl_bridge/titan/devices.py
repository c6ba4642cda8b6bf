"""What TorchTitan is told of this machine. Imported before its modules."""

import torch
import torchtitan.tools.utils as titan_utils

# TorchTitan takes a machine without an accelerator for one with CUDA; its modules read this on import.
if not torch.cuda.is_available():
    titan_utils.device_type, titan_utils.device_module = "cpu", torch.cpu
