"""The seed goes through hash() of a text, which differs from one process to the next."""

CAUGHT_BY = "same_seed_in_another_process"
CHANGES = {"server/environment.py": {"random.Random(seed)": 'random.Random(hash(f"deal {seed}"))'}}
