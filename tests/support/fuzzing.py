"""How much the tests of tests/fuzz try, and with what dice."""

import os
import random
import sys

LONG = "FUZZ_EXAMPLES" in os.environ
"""Whether to look for what nobody has seen yet: other examples each time, and as many as that says."""

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "5"))
"""Unit of work: each test takes some number of times this."""

SEED = int(os.environ.get("FUZZ_SEED", "0")) or (random.SystemRandom().randrange(1, 1 << 32) if LONG else 1)
"""Printed by the tests that fail; FUZZ_SEED=... tries the same again."""


def dice(number: int = 0) -> random.Random:
    """Return dice for the case of that number, and print which; pytest shows it with a test that fails."""
    sys.stdout.write(f"FUZZ_SEED={SEED}, case {number}\n")
    return random.Random(f"{SEED}.{number}")
