"""Evaluating a policy without training: required configuration, reports, refusals."""

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import starmap
from pathlib import Path
from typing import Any

import pytest
from module_run import finished

from openenv_core.cli.eval import COMMAND
from openenv_core.cli.main import run
from openenv_core.evaluation.records import FIGURES_FILE, RECORDS_FILE, EpisodeRecord, EvaluationFolder
from rl_bridge.config import Config, load_config, save_config
from rl_bridge.errors import ConfigError, RolloutError
from rl_bridge.loops.evaluation import require_policy_folder
from rl_bridge.rollout.assignment import held_out_seeds

EXAMPLE = Path(__file__).parents[3] / "examples" / "grpo_blackjack" / "config.yaml"


def config(**changes: Any) -> Config:
    base = {
        "env": {"url": "http://localhost:1"},
        "rollout": {"task": "a:B", "batch_size": 8},
        "model": {"path": str(Path(__file__).parent)},
    }
    return Config.model_validate(base | changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"env": None, "rollout": {}}, r"expected env.\* to evaluate on"),
        ({"model": {}}, "expected model.path, the checkpoint"),
        (
            {"model": {"path": "Qwen/Qwen3-0.6B"}},
            "to be a folder of this machine, there is none at .*Qwen3-0.6B",
        ),
        ({"evaluation": {"episodes": 0}}, "evaluation.episodes of at least 1"),
    ],
)
def test_incomplete_or_excessive_configuration_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        require_policy_folder(config(**changes))


@pytest.mark.heavy
def test_failed_evaluation_leaves_no_folder_but_what_the_task_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rl_bridge.loops import session

    folder = tmp_path / "runs" / "look"
    files_of_task: list[str] = []

    async def fail(*_: Any) -> None:
        for name in files_of_task:
            (folder / name).touch()
        raise RolloutError("it failed")

    monkeypatch.setattr(session, "_run_evaluation", fail)
    for names in ([], [], ["of the task"]):
        files_of_task += names
        with pytest.raises(RolloutError, match="it failed"):
            session.evaluate_run(config(), folder)
    assert [one.name for one in folder.iterdir()] == files_of_task
    with pytest.raises(ConfigError, match=r"cannot make the folder .*--name chooses another"):
        session.evaluate_run(config(), folder)


@pytest.mark.heavy
@pytest.mark.own_process
@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.soak), signal.SIGTERM])
def test_signal_ends_the_evaluation_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    from rl_bridge.loops import session

    stopped: list[str] = []

    @asynccontextmanager
    async def open_fake_players(*_: Any, **__: Any) -> AsyncIterator[None]:
        try:
            os.kill(os.getpid(), number)
            await asyncio.sleep(20)
            yield
        finally:
            stopped.append("in order")

    monkeypatch.setattr(session, "open_players", open_fake_players)
    monkeypatch.setattr(session, "load_tasks", lambda *_: {})
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with pytest.raises(KeyboardInterrupt):
            session.evaluate_run(config(), tmp_path / "look")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert stopped == ["in order"]
    assert not (tmp_path / "look").exists()


def words_of(policy: Path, folder: Path, *more: str) -> list[str]:
    words = ["--config", str(EXAMPLE), "--name", "look", f"model.path={policy}", f"output_dir={folder}"]
    return [*words, "evaluation.episodes=60", "env.sessions=8", "rollout.batch_size=8", *more]


@pytest.mark.soak
@pytest.mark.heavy
@pytest.mark.timeout(200)
def test_what_is_left_of_the_held_out_episodes_is_played(tiny_policy: Path, tmp_path: Path) -> None:
    """Of an evaluation that was killed: the figures are those of one in one go."""
    look = tmp_path / "look"
    (look / "rollouts").mkdir(parents=True)
    _, _, _, _, *overrides = words_of(tiny_policy, tmp_path, "generator.engine=vllm")
    save_config(load_config(EXAMPLE, overrides), look)
    seeds = held_out_seeds(0, 40)
    recorded = [record.model_dump_json() for record in starmap(won, enumerate(seeds))]
    (look / RECORDS_FILE).write_text("\n".join([*recorded, recorded[0][:20]]))
    evaluate_apart("--resume", str(look))
    report = json.loads((look / FIGURES_FILE).read_text())
    assert (report["episodes"], report["dropped"], report["unscored"]) == (60, 0, 0)
    assert sum(report["endings"].values()) == 60
    assert 40 * 1.0 - 20 * 2.0 <= 60 * report["mean_reward"] <= 60
    assert set(report["probe"]) == {"exact_return", "agreement"}
    lines = (look / RECORDS_FILE).read_text().splitlines()
    assert (lines[:40], len(lines)) == (recorded, 60)


def won(place: int, seed: int) -> EpisodeRecord:
    return EpisodeRecord(environment="", group=place, sibling=0, seed=seed, ending="completed", reward=1.0)


def test_folder_of_a_run_is_no_evaluations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("config.yaml", "run.lock"):
        (tmp_path / name).touch()
    assert run(COMMAND, ["--resume", str(tmp_path)]) == 2
    assert f"go on with it by: ropewalk train --resume {tmp_path}" in " ".join(
        capsys.readouterr().err.split()
    )


def evaluate_apart(*arguments: str, prepare: str = "", status: int = 0) -> str:
    """`ropewalk eval` in a process of its own, whose environment the engine needs; returns its errors."""
    program = (
        f"import sys\nfrom openenv_core.cli.main import run\nfrom openenv_core.cli.eval import COMMAND\n{prepare}"
        "sys.exit(run(COMMAND, sys.argv[1:]))"
    )
    done = finished(sys.executable, "-c", program, *arguments, cwd=EXAMPLE.parents[2], timeout_s=300)
    assert done.returncode == status, done.stderr
    return done.stderr


@pytest.mark.soak
@pytest.mark.heavy
@pytest.mark.timeout(400)
def test_run_that_cannot_be_played_is_no_evaluation(tiny_policy: Path, tmp_path: Path) -> None:
    words = words_of(tiny_policy, tmp_path, "generator.engine=vllm", "env.reset={hand: none}")
    errors = evaluate_apart(*words, status=1)
    assert re.search("not taken a single step: 60 of 60 .* no reset options but .* hand", errors)
    assert not (tmp_path / "look" / "evaluation.json").exists()


@pytest.mark.soak
@pytest.mark.heavy
@pytest.mark.timeout(400)
def test_checkpoint_plays_the_held_out_episodes(tiny_policy: Path, tmp_path: Path) -> None:
    evaluate_apart(*words_of(tiny_policy, tmp_path, "generator.engine=vllm"))
    report = json.loads((tmp_path / "look" / "evaluation.json").read_text())
    assert (report["episodes"], report["dropped"]) == (60, 0)


@pytest.mark.heavy
@pytest.mark.timeout(400)
def test_checkpoint_plays_an_environment_in_text(tmp_path: Path) -> None:
    """Its vocabulary has little but two calls, each a word, so that random weights play hands to their end."""
    call = '<tool_call>{{"name":"act","arguments":{{"action":"{}"}}}}</tool_call>'
    texts = [call.format("hit"), call.format("stand")]
    prepare = (
        "from rl_bridge.tiny_policy import make_tiny_policy\nfrom pathlib import Path\n"
        f"make_tiny_policy(Path(sys.argv[3]), {texts!r}, seed=1, max_length=512)\n"
    )
    words = ["blackjack", "--policy", str(tmp_path / "policy"), "--mode", "text", "--temperature", "1"]
    more = ["--max-tokens", "40", "--max-turns", "8", "--episodes", "12", "--out", str(tmp_path / "out")]
    evaluate_apart(*words, *more, prepare=prepare)
    endings = [one.ending for one in EvaluationFolder(tmp_path / "out").read().records.values()]
    assert len(endings) == 12
    assert "completed" in endings, endings
    assert set(endings) <= {"completed", "truncated_length", "truncated_turns"}
