"""Self-play against earlier versions: a short run on Kuhn poker, and the negotiation with a published model (soak)."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from e2e.conftest import Watched, rows
from published import published_model

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(900)]

KUHN = "examples/grpo_kuhn/config.yaml"
SHORT = (
    "env.seats={first: policy, second: frozen}",
    "env.exchange_seats=true",
    "env.sessions=16",
    "self_play.pool_interval=1",
    "self_play.deals=8",
    "self_play.opponents=['server:equilibrium']",
    "rollout.batch_size=64",
    "trainer.iterations=4",
    "trainer.warmup_updates=0",
    "trainer.checkpoint_interval=0",
    "evaluation.interval=0",
    "evaluation.episodes=8",
)


def tables(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "cross_table.jsonl").read_text().splitlines()]


def test_a_run_against_a_pool_of_versions(ropewalk: Callable[..., Watched], tmp_path: Path) -> None:
    run = ropewalk("train", "--config", KUHN, "--name", "run", f"output_dir={tmp_path}", *SHORT)
    assert run.wait(800) == 0, run.output()[-3000:]
    folder, iterations = tmp_path / "run", rows(tmp_path / "run")
    # The first meets the initial policy, and each later one a version that has been saved before.
    met = [int(row["opponent/version"]) for row in iterations]
    assert met[0] == 0
    assert all(version < number for number, version in enumerate(met, 1))
    assert len(set(met)) > 1
    assert sorted(path.name for path in (folder / "policies").iterdir()) == ["1", "2", "3", "4"]
    # A game is one trained trajectory, so nothing of its opponent's; half of them are played in each seat.
    for row in iterations:
        lost = row["rollout/ending/failed_reward"]
        assert row["rollout/trajectories"] == pytest.approx(64 * (1 - lost), abs=0.5)
        assert {"reward/seat/first_mean", "reward/seat/second_mean"} <= row.keys()
    (table,) = tables(folder)
    assert table["iteration"] == 4
    assert 0.0 < table["exploitability"] < 2.0
    assert [row["opponent"] for row in table["opponents"]] == ["0", "1", "2", "3", "server:equilibrium"]
    for row in table["opponents"]:
        assert sum(seat["games"] for seat in row["seats"].values()) + row["lost"] == 16
    assert iterations[-1]["cross/3/mean"] == table["opponents"][3]["mean"]
    assert "server:equilibrium" in run.output()


def legal_share(row: Mapping[str, Any]) -> tuple[float, float]:
    """Return the share of legal messages, and its variance."""
    share = 1.0 - row["illegal"] / row["answers"]
    return share, share * (1.0 - share) / row["answers"]


def joint_reward(row: Mapping[str, Any]) -> tuple[float, float]:
    """Return the mean joint reward over legal games, and its variance by the 95% interval."""
    low, high = row["joint"]["ci95"]
    return row["joint"]["mean"], ((high - low) / 2 / 1.96) ** 2


@pytest.mark.soak
@pytest.mark.timeout(9000)
def test_a_published_model_learns_to_agree_with_a_frozen_copy(
    ropewalk: Callable[..., Watched], tmp_path: Path
) -> None:
    words = (f"output_dir={tmp_path}", f"model.path={published_model()}")
    config = "examples/grpo_negotiation/config.yaml"
    run = ropewalk("train", "--config", config, "--name", "run", *words)
    assert run.wait(8400) == 0, run.output()[-3000:]
    before, after = (table["opponents"][0] for table in tables(tmp_path / "run"))
    for measure in (legal_share, joint_reward):
        (first, first_variance), (last, last_variance) = measure(before), measure(after)
        gain, half = last - first, 1.96 * math.sqrt(first_variance + last_variance)
        assert gain - half > 0, f"{measure.__name__}: {first:.3f} to {last:.3f}, {gain:.3f} +- {half:.3f}"
