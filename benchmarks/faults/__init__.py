"""Fault tolerance of a training run: processes are killed at random times, and the cost of each loss is measured."""
