"""Our clients, over every transport, against released servers."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from released import OVER_SOCKETS

from openenv_core import (
    CapacityError,
    EnvClient,
    GenericEnvClient,
    Observation,
    OpenEnvError,
    ProtocolError,
    State,
    StepResult,
    ValidationFailedError,
)

pytestmark = [pytest.mark.interop, pytest.mark.timeout(600)]


class Echo(Observation):
    echoed_message: str
    message_length: int


class EchoClient(EnvClient[dict[str, Any], Echo, State]):
    """A client written like subclasses for the released package."""

    def _step_payload(self, action: dict[str, Any]) -> dict[str, Any]:
        return action

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[Echo]:
        seen = Echo(**{k: v for k, v in payload["observation"].items() if k in Echo.model_fields})
        return StepResult(observation=seen, reward=payload.get("reward"), done=payload.get("done", False))

    def _parse_state(self, payload: dict[str, Any]) -> State:
        return State(**payload)


async def connect_with_retry(connect: Callable[[], Any]) -> Any:
    """Connect; the released server frees a slot a moment after its client has left."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await connect()
            except CapacityError:
                await asyncio.sleep(0.1)


@pytest.mark.parametrize("version", OVER_SOCKETS)
async def test_async_client_plays_released_servers(version: str, released_url: Callable[[str], str]) -> None:
    async def begin() -> Any:
        client = GenericEnvClient(base_url=url)
        try:
            return client, await client.reset(seed=3, episode_id="mine")
        except BaseException:
            await client.close()
            raise

    url = released_url(version)
    client, first = await connect_with_retry(begin)
    async with client:
        assert first.done is False
        assert first.observation["echoed_message"]
        step = await client.step({"message": "hello"})
        assert (step.observation["echoed_message"], step.done) == ("hello", False)
        assert step.reward == pytest.approx(0.5)
        assert (step.terminated, step.truncated, step.infrastructure_error) == (False, False, None)
        with pytest.raises(ValidationFailedError) as wrong:
            await client.step({"wrong": 1})
        assert {error["type"] for error in wrong.value.errors} == {"missing", "extra_forbidden"}
        assert (await client.state())["step_count"] == 1
        with pytest.raises(CapacityError) as full:
            async with GenericEnvClient(base_url=url, queue_timeout_s=0) as other:
                await other.reset()
        assert (full.value.active_sessions, full.value.max_sessions) == (1, 1)
        assert (await client.step({"message": "still there"})).observation["message_length"] == 11


@pytest.mark.soak
@pytest.mark.parametrize("version", OVER_SOCKETS)
def test_sync_client_of_a_subclass_plays_released_servers(
    version: str, released_url: Callable[[str], str]
) -> None:
    with EchoClient(base_url=released_url(version)).sync() as client:
        first = asyncio.run(connect_with_retry(lambda: asyncio.to_thread(client.reset)))
        assert isinstance(first.observation, Echo)
        step = client.step({"message": "hello"})
        assert step.observation.message_length == 5
        assert client.state().step_count == 1


async def test_client_plays_the_first_release_over_http(released_url: Callable[[str], str]) -> None:
    """The first release has one instance for all clients."""
    async with GenericEnvClient(base_url=released_url("0.1.1"), transport="http") as client:
        first = await client.reset()
        assert first.done is False
        for count in (1, 2):
            step = await client.step({"message": "hello"})
            assert step.observation["echoed_message"] == "hello"
            assert (await client.state())["step_count"] == count
        with pytest.raises(OpenEnvError):
            await client.step({"wrong": 1})


@pytest.mark.soak
@pytest.mark.parametrize("version", OVER_SOCKETS)
async def test_later_releases_keep_no_state_over_http_and_that_is_reported(
    version: str, released_url: Callable[[str], str]
) -> None:
    async with GenericEnvClient(base_url=released_url(version), transport="http") as client:
        with pytest.raises(ProtocolError, match='use transport="websocket"'):
            await client.reset()
