"""Reads the logged metrics of a run, and counts its hands."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


def load_metrics(metrics: Path) -> list[dict[str, Any]]:
    """Return the logged metrics of each iteration."""
    return [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]


def count_hands(rows: Sequence[Mapping[str, Any]]) -> NDArray[np.float64]:
    """Return the number of hands played by the end of each iteration.

    Hands of refused groups count too: dynamic sampling plays more than a batch.
    """
    hands = [
        row["rollout/trajectories"]
        * (row["rollout/groups"] + row["rollout/refused_groups"])
        / row["rollout/groups"]
        for row in rows
    ]
    return np.cumsum(np.array(hands, dtype=np.float64))
