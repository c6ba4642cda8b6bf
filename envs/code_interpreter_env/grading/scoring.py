"""From cases to a reward."""

import math
from collections.abc import Sequence

from .task import Scoring
from .trial import CaseInfo


def reward_of(scoring: Scoring, cases: Sequence[CaseInfo], passed: Sequence[bool]) -> float:
    """Return the reward, 0 to 1.

    A share is earned with hidden cases where there are any: the answers of public ones can be copied from the prompt.
    A whole 1 needs every case all the same.

    Args:
        scoring: "all_or_nothing", "fraction" or "weighted".
        cases: the task's cases.
        passed: which of them passed.
    """
    if all(passed):
        return 1.0
    if scoring == "all_or_nothing":
        return 0.0
    counted = [at for at, case in enumerate(cases) if case.hidden] or list(range(len(cases)))
    weights = {at: cases[at].weight if scoring == "weighted" else 1.0 for at in counted}
    share = math.fsum(weight for at, weight in weights.items() if passed[at]) / math.fsum(weights.values())
    # Some case failed: where only public ones did, this is short of a whole by the share of one case of average weight.
    return min(share, 1.0 - 1.0 / (len(cases) + 1))
