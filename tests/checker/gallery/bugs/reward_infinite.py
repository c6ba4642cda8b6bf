"""A right guess is worth more than any number."""

CAUGHT_BY = "reward_finite"
CHANGES = {"server/environment.py": {"1.0 if right else 0.0": '0.0 if action.number % 25 else float("inf")'}}
