"""Examples for single-turn tasks, in an order that is saved with a checkpoint."""
