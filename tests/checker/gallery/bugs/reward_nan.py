"""The reward of a guess is a ratio of nothing and nothing."""

CAUGHT_BY = "reward_finite"
CHANGES = {"server/environment.py": {"1.0 if right else 0.0": '1.0 if right else float("nan")'}}
