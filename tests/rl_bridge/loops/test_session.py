"""The session around the loop: its folder, its start, and SIGTERM."""

import asyncio
import errno
import io
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from openenv_core.evaluation.records import FIGURES_FILE, RECORDS_FILE, EvaluationFolder
from rl_bridge.config import CONFIG_FILE, Config, EvaluationConfig, load_config, save_config
from rl_bridge.errors import BridgeError, CheckpointError, ConfigError, RoleError, RolloutError, RunInUseError
from rl_bridge.loops.folder_lock import LOCK_FILE, lock_folder
from rl_bridge.rollout import EvaluationResult
from rl_bridge.rollout.task import to_floats
from rl_bridge.types import Ending, Trajectory

CONFIG = Config.model_validate({"env": {"app": "a:b"}, "rollout": {"task": "json:dumps"}})


@pytest.mark.heavy
def test_fewer_iterations_than_trained_and_a_taken_folder_are_refused(tmp_path: Path) -> None:
    from rl_bridge.loops.session import train_run

    config = Config.model_validate(
        {"env": {"app": "a:b"}, "rollout": {"task": "json:dumps"}, "trainer": {"iterations": 3}}
    )
    done = tmp_path / "checkpoint" / "step-4"
    done.mkdir(parents=True)
    with pytest.raises(ConfigError, match="at least 4"):
        train_run(config, tmp_path, resume=True)
    with pytest.raises(ConfigError, match="expected a new folder"):
        train_run(config, tmp_path, resume=False)
    assert done.exists()
    with pytest.raises(ConfigError, match=r"subclass of rl_bridge\.rollout\.Task"):
        train_run(config, tmp_path / "new", resume=False)
    assert not (tmp_path / "new").exists()  # the name is free for the next attempt


@pytest.mark.heavy
def test_run_that_is_under_way_is_not_resumed_and_keeps_its_configuration(tmp_path: Path) -> None:
    from rl_bridge.loops.session import train_run

    (tmp_path / CONFIG_FILE).write_text("the run's own")
    with lock_folder(tmp_path), pytest.raises(RunInUseError, match="expected the run's folder"):
        train_run(CONFIG, tmp_path, resume=True)
    assert (tmp_path / CONFIG_FILE).read_text() == "the run's own"


@pytest.mark.heavy
def test_folder_that_cannot_be_written_to_leaves_the_name_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rl_bridge.loops import session

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(session, "save_config", full)
    with pytest.raises(
        ConfigError, match=r"cannot write to .*: No space left on device; see that there is room"
    ):
        session.train_run(CONFIG, tmp_path / "new", resume=False)
    assert not (tmp_path / "new").exists()


@pytest.mark.heavy
def test_leftovers_of_a_run_that_never_began_are_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rl_bridge.loops import session

    configs: list[Config] = []

    def begin(config: Config, folder: Path, *, resume: bool) -> int:
        configs.append(load_config(folder / CONFIG_FILE))
        return 0

    monkeypatch.setattr(session, "_train", begin)
    (tmp_path / LOCK_FILE).write_text("{}")
    (tmp_path / f"{CONFIG_FILE}.partial").write_text("seed: ")
    with lock_folder(tmp_path), pytest.raises(RunInUseError):
        session.train_run(CONFIG, tmp_path, resume=False)
    assert session.train_run(CONFIG, tmp_path, resume=False) == 0
    assert configs == [CONFIG]
    with pytest.raises(ConfigError, match="expected a new folder"):
        session.train_run(CONFIG, tmp_path, resume=False)


@pytest.mark.heavy
@pytest.mark.parametrize("starts", [False, True])
def test_configuration_of_a_resumed_run_is_kept_until_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, starts: bool
) -> None:
    from rl_bridge.loops import session

    @asynccontextmanager
    async def opened(*_: object, **__: object) -> AsyncIterator[tuple[object, object]]:
        if not starts:
            raise RoleError("the reward function does not exist")
        yield SimpleNamespace(), SimpleNamespace(guard=guard)

    async def guard(work: Awaitable[bool]) -> bool:
        return await work

    async def told_to_go(run: object) -> bool:
        assert load_config(tmp_path / CONFIG_FILE).trainer.iterations == 7
        return False

    monkeypatch.setattr(session, "open_run", opened)
    monkeypatch.setattr(session, "train_with_recovery", told_to_go)
    before = CONFIG
    save_config(before, tmp_path)
    now = before.model_copy(update={"trainer": before.trainer.model_copy(update={"iterations": 7})})
    if starts:
        assert session.train_run(now, tmp_path, resume=True) == session.INTERRUPTED_STATUS
    else:
        with pytest.raises(RoleError):
            session.train_run(now, tmp_path, resume=True)
    assert load_config(tmp_path / CONFIG_FILE) == (now if starts else before)


async def run_session(monkeypatch: pytest.MonkeyPatch, *, train: Any, evaluate: Any) -> list[str]:
    """A session whose parts are these; returns what it did."""
    from rl_bridge.loops import session

    did: list[str] = []

    async def guard(work: Any) -> Any:
        return await work

    async def report(*_: Any) -> None:
        did.append("reported")

    async def waited() -> None:
        did.append("waited for the checkpoint")

    @asynccontextmanager
    async def opened(*_: Any, **__: Any) -> AsyncIterator[Any]:
        run = SimpleNamespace(
            did=did,
            preempted=False,
            preempt=lambda: did.append("preempted"),
            tasks={"": SimpleNamespace(report=report)},
            chat=None,
            console=Console(file=io.StringIO()),
            checkpoint_begun=0,
            wait_for_checkpoint=waited,
        )
        try:
            yield run, SimpleNamespace(guard=guard)
        finally:
            did.append("stopped")

    monkeypatch.setattr(session, "open_run", opened)
    monkeypatch.setattr(session, "train_with_recovery", train)
    monkeypatch.setattr(session, "evaluate", evaluate)
    config = Config.model_validate(
        {"env": {"app": "a:b"}, "rollout": {"task": "c:D", "checkpoint_on_preemption": True}}
    )
    own = asyncio.ensure_future(session._run_session(config, Path(), console=Console(), resume=False))
    try:
        did.append("ended" if await asyncio.wait_for(own, 60) else "told to go")
    except asyncio.CancelledError:
        did.append("cancelled")
    finally:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
    return did


async def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(0.05)


@pytest.mark.heavy
@pytest.mark.soak
@pytest.mark.own_process
async def test_while_it_trains_the_iteration_is_ended_and_a_second_signal_ends_it_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def train(run: Any) -> bool:
        for _ in range(3):
            await terminate()
        return False

    assert await run_session(monkeypatch, train=train, evaluate=None) == ["preempted", "stopped", "cancelled"]


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("begun", "whole", "failure", "waits"),
    [
        (3, 2, RolloutError("the environment is gone"), True),
        (3, 3, RolloutError("the environment is gone"), False),
        (0, 0, RolloutError("the environment is gone"), False),
        (3, 2, CheckpointError("the disk is full"), False),
    ],
)
async def test_run_that_fails_ends_only_when_its_last_checkpoint_is_whole(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    begun: int,
    whole: int,
    failure: BridgeError,
    waits: bool,
) -> None:
    """The processes are given seconds to end, and a large checkpoint takes minutes."""
    did: list[str] = []

    async def train(run: Any) -> bool:
        nonlocal did
        did, run.folder, run.checkpoint_begun = run.did, tmp_path, begun
        (tmp_path / "checkpoint" / f"step-{whole}").mkdir(parents=True)
        raise failure

    with pytest.raises(type(failure), match=str(failure)):
        await run_session(monkeypatch, train=train, evaluate=None)
    assert did == [*(["waited for the checkpoint"] if waits else []), "stopped"]


@pytest.mark.heavy
async def test_signal_that_comes_when_the_training_is_just_over_ends_the_run_before_its_evaluation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def train(run: Any) -> bool:
        run.preempted = True  # by the signal, when the last look at this was over
        return True

    assert await run_session(monkeypatch, train=train, evaluate=None) == ["stopped", "told to go"]


class Deaf:
    """A service of which the first fan-out never returns: one of its workers stands still."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def __getattr__(self, name: str) -> "Deaf":
        return self

    async def fanout(self, news: Any) -> None:
        self.told.append(news)
        if news == "old":
            await asyncio.sleep(60)


@pytest.mark.heavy
async def test_unresponsive_worker_delays_no_announcement_to_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from rl_bridge.loops import assembly

    monkeypatch.setattr(assembly, "WORKER_UPDATE_TIMEOUT_S", 0.05)
    failures: list[BaseException] = []
    on_failure: Callable[[BaseException], None] = failures.append
    worker_updates, service = assembly.WorkerUpdates(on_error=on_failure), Deaf()
    await worker_updates.begin(service)  # type: ignore[arg-type]
    worker_updates.tell("take_servers", "old")
    await asyncio.sleep(0.02)
    worker_updates.tell("take_servers", "new")
    async with asyncio.timeout(30):
        while "new" not in service.told:  # noqa: ASYNC110 - a fake has no event
            await asyncio.sleep(0.01)
    await worker_updates.close()
    assert service.told == ["old", "new"]
    assert failures == []


@pytest.mark.heavy
@pytest.mark.parametrize(("colocate", "expected"), [(False, 5.0), (True, 45.0)])
def test_start_may_wait_for_another_s_turn(colocate: bool, expected: float) -> None:
    from rl_bridge.loops.assembly import start_timeout_s

    config = Config.model_validate(
        {
            "env": {"app": "a:b"},
            "rollout": {"task": "c:D"},
            "trainer": {"timeout_s": 40.0},
            "monarch": {"start_timeout_s": 5.0, "colocate": colocate},
        }
    )
    assert start_timeout_s(config) == expected


@pytest.mark.heavy
async def test_start_reports_slow_roles_and_start_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rl_bridge.loops import assembly
    from rl_bridge.services.actor import BoundOptions

    policy_may, messages = asyncio.Event(), list[str]()

    async def as_service(bound: Any, *_: Any) -> str:
        if bound.options.name == "policy":
            await policy_may.wait()
        return str(bound.options.name)

    def tell(text: str) -> None:
        messages.append(text)
        if "still starting" in text:
            policy_may.set()

    monkeypatch.setattr(assembly, "START_REPORT_INTERVAL_S", 0.01)
    monkeypatch.setattr(BoundOptions, "as_service", as_service)
    roles: Any = await assembly.start_roles(CONFIG, tmp_path, tmp_path, None, tell)
    assert roles == {"policy": "policy", "rollout": "rollout"}
    assert messages[0].startswith("policy still starting after 0 s; logs: ")
    assert messages[-1] == "started: policy after 0 s, rollout after 0 s"


@pytest.mark.heavy
async def test_a_run_keeps_its_held_out_episodes_and_their_figures(tmp_path: Path) -> None:
    from rl_bridge.loops.session import _report

    reported: list[EvaluationResult] = []

    async def play_held_out(seeds: Sequence[int], done: Callable[..., None], **others: Any) -> None:
        for place, seed in enumerate(seeds):
            done(place, Trajectory(seed=seed, turns=[], ending=Ending.COMPLETED, reward=float(place)))

    async def report(policy: Any, result: EvaluationResult) -> None:
        reported.append(result)

    run: Any = SimpleNamespace(
        config=CONFIG.model_copy(update={"evaluation": EvaluationConfig(episodes=4)}),
        folder=tmp_path,
        version=2,
        dispatcher=SimpleNamespace(play_held_out=play_held_out),
        tasks={"": SimpleNamespace(report=report)},
        chat=None,
        train_seconds=3.0,
    )
    for _ in range(2):
        await _report(run)
    assert [(list(one.rewards), one.train_seconds) for one in reported] == [([0.0, 1.0, 2.0, 3.0], 3.0)] * 2
    folder = EvaluationFolder(tmp_path / "evaluation").read()
    assert [one.version for one in folder.records.values()] == [2] * 4
    assert json.loads((folder.path / FIGURES_FILE).read_text())["mean_reward"] == 1.5
    assert len((folder.path / RECORDS_FILE).read_text().splitlines()) == 4

    async def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    run.tasks = {"": SimpleNamespace(report=full)}
    with pytest.raises(BridgeError, match=r"cannot write the report .*No space left on device; .*--resume"):
        await _report(run)


def test_numbers_of_any_library_can_be_logged() -> None:
    metrics = to_floats({"wins": np.float32(0.5), "length": torch.tensor([3]), "lost": 1}, "metrics")
    assert json.loads(json.dumps(metrics)) == {"wins": 0.5, "length": 3.0, "lost": 1.0}


@pytest.mark.parametrize("value", ["most", None, [1.0, 2.0], torch.zeros(2)])
def test_non_numeric_metric_is_refused_by_name(value: object) -> None:
    with pytest.raises(RolloutError, match=r"the task's probe\(\), got wins="):
        to_floats({"wins": value}, "probe")
