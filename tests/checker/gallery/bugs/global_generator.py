"""Everybody draws from the module's generator, which each reset seeds."""

CAUGHT_BY = "sessions_are_separate"
CHANGES = {
    "server/environment.py": {
        "self._random = random.Random(seed)": "random.seed(seed)",
        "self._random.randint(1, 100)": "random.randint(1, 100)",
        "self._random.randint(0, 1)": "random.randint(0, 1)",
    }
}
ALSO_SKIPPED = {"sessions_at_once"}
