"""Examples for single-turn tasks, in an order that a checkpoint can hold."""
