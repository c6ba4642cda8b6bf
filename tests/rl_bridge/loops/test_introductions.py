"""Workers that are told whom they work with, one of which does not listen."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.heavy  # the services import Monarch


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


async def test_worker_that_does_not_listen_keeps_no_news_from_the_others() -> None:
    from rl_bridge.loops.introductions import Introductions

    failures: list[BaseException] = []
    told: Callable[[BaseException], None] = failures.append
    introductions, service = Introductions(failed=told, patience_s=0.05), Deaf()
    await introductions.begin(service)  # type: ignore[arg-type]
    introductions.tell("take_servers", "old")
    await asyncio.sleep(0.02)
    introductions.tell("take_servers", "new")
    async with asyncio.timeout(5):
        while "new" not in service.told:  # noqa: ASYNC110 - a fake has no event
            await asyncio.sleep(0.01)
    await introductions.close()
    assert service.told == ["old", "new"]
    assert failures == []
