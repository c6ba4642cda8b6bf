"""Fixtures of the gateway's tests: a served gateway in front of a scripted policy."""

import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "rollout"))  # its tokenizer of pieces, its world of tools

from gateway_fixtures import Stage


@pytest.fixture
async def stage(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., "Stage"]]:
    """Return a function that serves a gateway, and opens episodes of a policy that answers by a script."""
    async with AsyncExitStack() as stack:

        def make(*arguments: object, **options: object) -> Stage:
            return Stage(monkeypatch, stack, *arguments, **options)  # type: ignore[arg-type]

        yield make
