"""The trainer: a TorchTitan model, its optimizer, schedule and checkpoints."""
