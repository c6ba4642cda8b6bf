"""The number of examples and the random generators of tests/fuzz."""

import os
import random
import sys

LONG = "FUZZ_EXAMPLES" in os.environ
"""Whether to try new examples each time, as many as the variable says."""

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "5"))
"""Unit of work: each test runs a multiple of this."""

SEED = int(os.environ.get("FUZZ_SEED", "0")) or (random.SystemRandom().randrange(1, 1 << 32) if LONG else 1)
"""Printed by failing tests; FUZZ_SEED=... reproduces them."""


def dice(number: int = 0) -> random.Random:
    """Return the random generator of a numbered case, and print its seed, which pytest shows for failing tests."""
    sys.stdout.write(f"FUZZ_SEED={SEED}, case {number}\n")
    return random.Random(f"{SEED}.{number}")
