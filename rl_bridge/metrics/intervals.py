"""How sure one can be of a mean, or of a share."""

import math
import statistics
from collections.abc import Sequence
from typing import Final

TABLE: Final = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""Student's t, two-sided at 95%, for 1 to 30 degrees of freedom."""
NORMAL: Final = 1.959964
Z95: Final = 1.96
"""The same, as textbooks round it and as the reported intervals of shares were made."""


def student_95(degrees: int) -> float:
    """How many standard errors a mean's 95% interval reaches to each side, by Student's distribution (1908).

    Beyond the table by the expansion in 1 / degrees (Abramowitz and Stegun, 26.7.5), which is within 1e-4 there.
    """
    if degrees <= len(TABLE):
        return TABLE[degrees - 1]
    z = NORMAL
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)


def mean_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The 95% interval of the mean of values that are drawn independently.

    None with fewer than two values, and where all are the same: from no spread it would be without width, as if nothing
    were uncertain any more.
    """
    if len(set(values)) < 2:
        return None
    mean = statistics.fmean(values)
    half = student_95(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return mean - half, mean + half


def wilson_interval(successes: int, trials: int) -> tuple[float, float]:
    """The 95% interval of a share, by Wilson's score (1927), which holds near 0 and 1 too."""
    share = successes / trials
    centre = (share + Z95**2 / (2 * trials)) / (1 + Z95**2 / trials)
    margin = Z95 / (1 + Z95**2 / trials) * math.sqrt(share * (1 - share) / trials + Z95**2 / (4 * trials**2))
    return max(0.0, centre - margin), min(1.0, centre + margin)
