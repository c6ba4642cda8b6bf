"""Servers of a run in containers: a lost one is replaced by one that is warm, and none stays."""

import asyncio
from contextlib import suppress
from http.client import HTTPException
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from docker_engine import engine
from serving import eventually
from slim_server import IMAGE, command

from openenv_core.errors import ProviderError
from openenv_core.providers.docker import DockerEngine
from rl_bridge.environments.servers import EnvironmentServers
from rl_bridge.services.restarts import RestartPolicy

__all__ = ["engine"]

pytestmark = [pytest.mark.docker, pytest.mark.soak]

HANG_S = 60.0
LABEL = "ropewalk-test.servers"
CONTAINER: dict[str, Any] = {
    "command": command(),
    "user": "65534",
    "stop_timeout_s": 0.0,
    "labels": {LABEL: "1"},
}


def healthy(url: str) -> bool:
    with urlopen(f"{url}/health", timeout=60) as answer:
        return b"healthy" in answer.read()


async def test_a_container_that_ends_is_replaced_and_none_stays(engine: DockerEngine) -> None:
    notified: list[tuple[str, ...]] = []

    async def changed(urls: tuple[str, ...]) -> None:
        notified.append(urls)

    async with EnvironmentServers(
        image=IMAGE, count=2, container=CONTAINER, on_change=changed, restarts=RestartPolicy(backoff_s=0.0)
    ) as servers:
        first, second = servers.urls
        assert healthy(first)
        assert healthy(second)
        with suppress(URLError, HTTPException, ConnectionError):
            await asyncio.to_thread(urlopen, f"{first}/die", timeout=60)
        await eventually(lambda: servers.started[0].restarts == 1 and len(servers.urls) == 2)
        third, same = servers.urls
        assert same == second
        assert healthy(third)
        assert (second,) in notified
        assert notified[-1] == (third, second)
    await eventually(lambda: not engine.list_labelled(f"{LABEL}=1"))


async def test_an_image_that_is_not_there_is_told_at_the_start(engine: DockerEngine) -> None:
    with pytest.raises(ProviderError, match="expected an image 'no-such-image:1'"):
        async with asyncio.timeout(HANG_S), EnvironmentServers(image="no-such-image:1"):
            pytest.fail("it was started")
