"""What a person watches: a line per iteration."""

import re
from collections.abc import Mapping

COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("reward/mean", "reward", "+.3f"),
    ("policy/entropy", "entropy", ".3f"),
    ("rollout/ending/illegal_answer", "illegal", ".1%"),
    ("rollout/ending/failed_environment", "failed", ".1%"),
    ("rollout/episodes_retried", "retried", ".0f"),
    ("rollout/zero_variance_share", "zero-var", ".0%"),
    ("policy/kl_to_reference", "kl", ".4f"),
    ("mismatch/logprob_max", "mismatch", ".0e"),
    ("train/grad_norm", "grad", ".2f"),
    ("time/rollout_s", "roll", ".2f"),
    ("time/train_s", "train", ".2f"),
    ("time/sync_s", "sync", ".2f"),
)
"""Figure, heading, format. A figure that an iteration lacks is left out of its line."""
TROUBLES: frozenset[str] = frozenset({"rollout/ending/failed_environment", "rollout/episodes_retried"})
"""Those that are left out where they are 0. Attempts are counted since the run began."""


def iteration_line(
    iteration: int, iterations: int, metrics: Mapping[str, float], *, remaining_s: float
) -> str:
    """The line of one iteration; `remaining_s` is an estimate."""
    cells = [
        f"{heading} {metrics[name]:{form}}"
        for name, heading, form in COLUMNS
        if name in metrics and (metrics[name] or name not in TROUBLES)
    ]
    environments = [
        f"{found[1]} {value:+.3f}"
        for name, value in metrics.items()
        if (found := re.fullmatch("env/(.*)/reward/mean", name))
    ]
    probes = [
        f"{name.removeprefix('env/').replace('probe/', '', 1)} {value:+.4f}"
        for name, value in metrics.items()
        if name.startswith("probe/") or (name.startswith("env/") and "/probe/" in name)
    ]
    minutes, seconds = divmod(round(remaining_s), 60)
    left = f"{minutes}:{seconds:02d} left"
    return "  ".join([f"{iteration:>4}/{iterations}", *cells, *environments, *probes, left])
