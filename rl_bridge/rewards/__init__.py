"""Rewards computed outside of the environment: by functions in separate processes, or by learned models."""
