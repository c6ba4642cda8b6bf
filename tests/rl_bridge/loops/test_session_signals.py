"""SIGTERM to a run that writes a checkpoint before it ends: what it does depends on what there is to lose."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

pytestmark = [pytest.mark.heavy, pytest.mark.soak, pytest.mark.own_process]  # the session imports Monarch


async def run_session(monkeypatch: pytest.MonkeyPatch, *, train: Any, evaluate: Any) -> list[str]:
    """A session whose parts are these; returns what it did."""
    from rl_bridge.config import Config
    from rl_bridge.loops import session

    did: list[str] = []

    async def guard(work: Any) -> Any:
        return await work

    async def report(*_: Any) -> None:
        did.append("reported")

    @asynccontextmanager
    async def opened(*_: Any, **__: Any) -> AsyncIterator[Any]:
        run = SimpleNamespace(
            preempt=lambda: did.append("preempted"), task=SimpleNamespace(report=report), chat=None
        )
        try:
            yield run, SimpleNamespace(guard=guard)
        finally:
            did.append("stopped")

    monkeypatch.setattr(session, "open_run", opened)
    monkeypatch.setattr(session, "train_to_the_end", train)
    monkeypatch.setattr(session, "evaluate", evaluate)
    config = Config.model_validate(
        {"env": {"app": "a:b"}, "rollout": {"task": "c:D", "checkpoint_on_preemption": True}}
    )
    own = asyncio.ensure_future(session._session(config, Path(), console=Console(), resume=False))
    try:
        did.append("ended" if await asyncio.wait_for(own, 10) else "told to go")
    except asyncio.CancelledError:
        did.append("cancelled")
    finally:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
    return did


async def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(0.05)


async def test_while_it_trains_the_iteration_is_ended_and_a_second_signal_ends_it_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def train(run: Any) -> bool:
        for _ in range(3):
            await terminate()
        return False

    assert await run_session(monkeypatch, train=train, evaluate=None) == ["preempted", "stopped", "cancelled"]


async def test_while_it_evaluates_it_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def train(run: Any) -> bool:
        return True

    async def evaluate(run: Any) -> None:
        await terminate()
        await asyncio.sleep(60)

    assert await run_session(monkeypatch, train=train, evaluate=evaluate) == ["stopped", "cancelled"]


async def test_run_that_was_told_to_go_is_not_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    async def train(run: Any) -> bool:
        await terminate()
        return False

    assert await run_session(monkeypatch, train=train, evaluate=None) == [
        "preempted",
        "stopped",
        "told to go",
    ]
