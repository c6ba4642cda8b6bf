"""A published model learns through an agent, a loop over an OpenAI client, to write legal calls."""

import json
import logging
import math
import os
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml
from e2e.conftest import Watched, rows
from published import published_model

pytestmark = [pytest.mark.heavy, pytest.mark.soak, pytest.mark.timeout(3600)]

logger = logging.getLogger(__name__)

ITERATIONS = 10
EPISODES = 64
COMPARED = 2
"""How many iterations at the beginning and at the end are compared."""
TRAINING_TIMEOUT_S = 3000.0

CONFIG: dict[str, Any] = {
    "algorithm": {"name": "grpo", "normalize_std": False, "aggregation": "token_mean"},
    "trainer": {
        "iterations": ITERATIONS,
        "learning_rate": 2e-5,
        "warmup_updates": 2,
        "checkpoint_interval": 0,
        "num_threads": 2,
        "tokens_per_pass": 2048,
        "tokens_per_chunk": 512,
    },
    "monarch": {"start_timeout_s": 1200.0},
    "model": {"tool_calls": "hermes"},
    "env": {"app": "agent_loop_world:agent_table_app", "sessions": EPISODES, "reset": {"max_calls": 2}},
    "rollout": {
        "task": "agent_loop_world:AgentTableTask",
        "agent": {"function": "agent_loop_world:play"},
        "batch_size": EPISODES,
        "group_size": 8,
        "num_turns": 2,
        "max_new_tokens": 64,
        "max_length": 768,
        "max_num_seqs": EPISODES,
        "kv_cache_mb": 1024,
    },
    "evaluation": {"interval": 0, "episodes": 8},
}


def test_illegal_calls_fall(
    ropewalk: Callable[..., Watched], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    log = tmp_path / "answers.jsonl"
    monkeypatch.setenv("AGENT_LOOP_LOG", str(log))
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(CONFIG))
    words = ("--config", str(file), f"output_dir={tmp_path}", f"model.path={published_model()}")
    run = ropewalk("train", *words, "--name", "run")
    assert run.wait(TRAINING_TIMEOUT_S) == 0, run.output()[-3000:]
    metrics = rows(tmp_path / "run")
    assert len(metrics) == ITERATIONS
    assert max(row["mismatch/logprob_max"] for row in metrics) <= 2e-4

    episodes = [json.loads(line) for line in log.read_text().splitlines()]  # in order: no iteration overlaps
    assert len(episodes) >= ITERATIONS * EPISODES
    groups = [
        group_shares(episodes[first : first + EPISODES])
        for first in range(0, ITERATIONS * EPISODES, EPISODES)
    ]
    logger.info("illegal answers by iteration: %s", [round(statistics.mean(one), 3) for one in groups])
    logger.info("reward by iteration: %s", [round(row["reward/mean"], 3) for row in metrics])
    first, last = (list(chain(*some)) for some in (groups[:COMPARED], groups[-COMPARED:]))
    fall, margin = compare_means(first, last)
    logger.info(
        "illegal in the first and last %d iterations: %.3f, %.3f; fall %.3f [%.3f, %.3f], %d groups of 8 each",
        *(
            COMPARED,
            statistics.mean(first),
            statistics.mean(last),
            fall,
            fall - margin,
            fall + margin,
            len(first),
        ),
    )
    assert 0.2 <= statistics.mean(first) <= 0.8
    assert fall - margin > 0


def group_shares(episodes: Sequence[Any]) -> list[float]:
    """Return the share of illegal answers of each group of siblings."""
    answers: defaultdict[str, list[bool]] = defaultdict(list)
    for one in episodes:
        answers[one["task"]] += [not legal for legal in one["legal"]]
    return [statistics.mean(group) for group in answers.values()]


def compare_means(first: Sequence[float], last: Sequence[float]) -> tuple[float, float]:
    """Return by how much the mean falls, and half of its interval of 95% over groups (Welch, two standard errors)."""
    error = math.sqrt(statistics.variance(first) / len(first) + statistics.variance(last) / len(last))
    return statistics.mean(first) - statistics.mean(last), 2.0 * error
