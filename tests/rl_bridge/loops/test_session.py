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

import pytest
from loop_stage import raising
from rich.console import Console

from openenv_core.evaluation.records import FIGURES_FILE, RECORDS_FILE, EvaluationFolder
from rl_bridge.config import CONFIG_FILE, Config, EvaluationConfig, load_config, save_config
from rl_bridge.errors import BridgeError, CheckpointError, ConfigError, RoleError, RolloutError, RunInUseError
from rl_bridge.loops.folder_lock import LOCK_FILE, lock_folder
from rl_bridge.rollout import EvaluationResult
from rl_bridge.types import Ending, Trajectory

pytestmark = pytest.mark.heavy

CONFIG = Config.model_validate({"env": {"app": "a:b"}, "rollout": {"task": "json:dumps"}})


def with_iterations(count: int) -> Config:
    return CONFIG.model_copy(update={"trainer": CONFIG.trainer.model_copy(update={"iterations": count})})


async def guard(work: Awaitable[Any]) -> Any:
    return await work


@pytest.fixture
def session() -> Any:
    """The module, which imports Monarch."""
    from rl_bridge.loops import session

    return session


def test_run_that_cannot_begin_leaves_everything_as_it_is(
    session: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, new = tmp_path / "done", tmp_path / "new"
    (done / "checkpoint" / "step-4").mkdir(parents=True)
    (done / CONFIG_FILE).write_text("the run's own")
    with pytest.raises(ConfigError, match="at least 4"):
        session.train_run(with_iterations(3), done, resume=True)
    with pytest.raises(ConfigError, match="expected a new folder"):
        session.train_run(CONFIG, done, resume=False)
    with lock_folder(done), pytest.raises(RunInUseError, match="expected the run's folder"):
        session.train_run(CONFIG, done, resume=True)
    assert (done / "checkpoint" / "step-4").exists()
    assert (done / CONFIG_FILE).read_text() == "the run's own"
    # The name of a new one is free for the next attempt.
    with pytest.raises(ConfigError, match=r"subclass of rl_bridge\.rollout\.Task"):
        session.train_run(CONFIG, new, resume=False)
    assert not new.exists()
    full = raising(OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(session, "save_config", lambda *_: full())
    with pytest.raises(ConfigError, match=r"cannot write to .*: No space left on device; see that there"):
        session.train_run(CONFIG, new, resume=False)
    assert not new.exists()


def test_leftovers_of_a_run_that_never_began_are_no_run(
    session: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_configuration_of_a_resumed_run_is_kept_until_it_has_started(
    session: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = [RoleError("the reward function does not exist")]

    @asynccontextmanager
    async def opened(*_: object, **__: object) -> AsyncIterator[tuple[object, object]]:
        if fails:
            raise fails.pop()
        yield SimpleNamespace(), SimpleNamespace(guard=guard)

    async def told_to_go(run: object) -> bool:
        assert load_config(tmp_path / CONFIG_FILE) == now
        return False

    monkeypatch.setattr(session, "open_run", opened)
    monkeypatch.setattr(session, "train_with_recovery", told_to_go)
    save_config(CONFIG, tmp_path)
    now = with_iterations(7)
    with pytest.raises(RoleError):
        session.train_run(now, tmp_path, resume=True)
    assert load_config(tmp_path / CONFIG_FILE) == CONFIG
    assert session.train_run(now, tmp_path, resume=True) == session.INTERRUPTED_STATUS
    assert load_config(tmp_path / CONFIG_FILE) == now


async def run_session(session: Any, monkeypatch: pytest.MonkeyPatch, train: Any) -> list[str]:
    """A session that trains so; returns what it did."""
    did: list[str] = []

    async def waited() -> None:
        did.append("waited for the checkpoint")

    @asynccontextmanager
    async def opened(*_: Any, **__: Any) -> AsyncIterator[Any]:
        run = SimpleNamespace(
            did=did,
            preempted=False,
            preempt=lambda: did.append("preempted"),
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


@pytest.mark.soak
@pytest.mark.own_process
async def test_while_it_trains_the_iteration_is_ended_and_a_second_signal_ends_it_at_once(
    session: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def train(run: Any) -> bool:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.05)
        return False

    assert await run_session(session, monkeypatch, train) == ["preempted", "stopped", "cancelled"]


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
    session: Any,
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
        await run_session(session, monkeypatch, train)
    assert did == [*(["waited for the checkpoint"] if waits else []), "stopped"]


async def test_signal_that_comes_when_the_training_is_just_over_ends_the_run_before_its_evaluation(
    session: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def train(run: Any) -> bool:
        run.preempted = True  # by the signal, when the last look at this was over
        return True

    assert await run_session(session, monkeypatch, train) == ["stopped", "told to go"]


class Deaf:
    """A service of which the first fan-out never returns: one of its workers stands still."""

    def __init__(self) -> None:
        self.name = "rollout"
        self.told: list[Any] = []
        self.take_servers = self

    async def fanout(self, news: Any) -> None:
        self.told.append(news)
        if news == "old":
            await asyncio.sleep(60)


async def test_unresponsive_worker_delays_no_announcement_to_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from rl_bridge.loops import assembly

    monkeypatch.setattr(assembly, "UPDATE_TIMEOUT_S", 0.05)
    failures: list[BaseException] = []
    worker_updates, service = assembly.ServiceUpdates(on_error=failures.append), Deaf()
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


def test_start_may_wait_for_another_s_turn() -> None:
    from rl_bridge.loops.assembly import start_timeout_s

    def timeout_s(*, colocate: bool) -> float:
        monarch = {"start_timeout_s": 5.0, "colocate": colocate}
        settings = {"rollout": {}, "trainer": {"timeout_s": 40.0}, "monarch": monarch}
        return start_timeout_s(Config.model_validate(settings))

    assert (timeout_s(colocate=False), timeout_s(colocate=True)) == (5.0, 45.0)


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


async def test_a_run_keeps_its_held_out_episodes_and_their_figures(session: Any, tmp_path: Path) -> None:
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
        await session._report(run)
    assert [(list(one.rewards), one.train_seconds) for one in reported] == [([0.0, 1.0, 2.0, 3.0], 3.0)] * 2
    folder = EvaluationFolder(tmp_path / "evaluation").read()
    assert [one.version for one in folder.records.values()] == [2] * 4
    assert json.loads((folder.path / FIGURES_FILE).read_text())["mean_reward"] == 1.5
    assert len((folder.path / RECORDS_FILE).read_text().splitlines()) == 4

    full = raising(OSError(errno.ENOSPC, "No space left on device"))
    run.tasks = {"": SimpleNamespace(report=lambda *_: full())}
    with pytest.raises(BridgeError, match=r"cannot write the report .*No space left on device; .*--resume"):
        await session._report(run)
