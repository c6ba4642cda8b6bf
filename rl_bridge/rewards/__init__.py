"""Rewards that are computed outside of the environment: functions in processes of their own, learned models."""
