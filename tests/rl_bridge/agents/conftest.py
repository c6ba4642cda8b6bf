"""Fixtures of the agents' tests: an environment of tools that is served, and a worker whose agent plays it."""

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from serving import serving

_BRIDGE = Path(__file__).parents[1]
# The tokenizer of pieces and the world of tools; the policy that answers by a script.
sys.path[:0] = [str(_BRIDGE / "rollout"), str(_BRIDGE / "gateway")]


@pytest.fixture
async def desk(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    from tool_fixtures import desk_app

    from rl_bridge.rollout import episode as attempts

    monkeypatch.setattr(attempts, "BACKOFF_S", 0.001)
    async with serving(desk_app) as address:
        yield f"http://{address}"
