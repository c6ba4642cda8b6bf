"""Every episode is that of one seed."""

CAUGHT_BY = "different_seeds_differ"
CHANGES = {"server/environment.py": {"random.Random(seed)": "random.Random(7)"}}
