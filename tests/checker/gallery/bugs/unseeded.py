"""The seed is taken and forgotten: the generator is seeded by the clock."""

CAUGHT_BY = "same_seed_same_episode"
CHANGES = {"server/environment.py": {"self._random = random.Random(seed)": "self._random = random.Random()"}}
ALSO_SKIPPED = {
    "reset_forgets",
    "same_seed_in_another_process",
    "same_seed_over_the_wire",
    "different_seeds_differ",
}
