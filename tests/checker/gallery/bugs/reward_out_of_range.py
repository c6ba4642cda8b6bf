"""A wrong guess costs a tenth, where the manifest promises 0 to 1."""

CAUGHT_BY = "reward_in_range"
CHANGES = {"server/environment.py": {"1.0 if right else 0.0": "1.0 if right else -0.1"}}
