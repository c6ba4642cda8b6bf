"""The trainer: a TorchTitan model with its optimizer, schedule and checkpoints."""
