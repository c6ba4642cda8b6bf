"""How long is waited before what failed is tried again."""

from types import SimpleNamespace

import pytest

from rl_bridge.rollout import attempts


async def test_waits_double_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr(attempts, "asyncio", SimpleNamespace(sleep=sleep))
    for failed in (1, 2, 3, 6, 7, 10_000):
        await attempts.back_off(failed)
    assert waited == pytest.approx([0.1, 0.2, 0.4, 3.2, 5.0, 5.0])
