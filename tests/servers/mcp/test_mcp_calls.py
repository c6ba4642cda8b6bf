"""Calls by official clients: results, failures, progress, requests to the client, cancellation."""

import asyncio
import gc
import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import mcp_types as types
import pytest
from mcp.client.client import Client
from mcp.shared.exceptions import MCPDeprecationWarning, MCPError
from mcp_hosts import HANDSHAKE, STATELESS, host, text_of
from mcp_requests import connected, start_call
from serving import WAIT_TIMEOUT_S, eventually, open_session, rpc, serving
from toolbox import ToolBox, toolbox_app

from openenv_core import EpisodeOverError
from openenv_core.tools import (
    NoSuchResourceError,
    ToolAction,
    ToolContext,
    ToolObservation,
    ToolSpec,
    prompt,
    resource,
    tool,
)
from servers import create_app

ERAS = [HANDSHAKE, STATELESS]

# Where the two take the same way through our code, the second is left to the third tier.
handshake_first = pytest.mark.parametrize("era", [HANDSHAKE, pytest.param(STATELESS, marks=pytest.mark.soak)])
stateless_first = pytest.mark.parametrize("era", [STATELESS, pytest.param(HANDSHAKE, marks=pytest.mark.soak)])


@pytest.fixture(params=ERAS)
def era(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def test_tool_results_have_every_content_form(era: str) -> None:
    async with serving(toolbox_app()) as address, await connected(address, era) as client:
        where = await client.call_tool("where")
        assert where.structured_content is not None
        assert not where.is_error
        picture = await client.call_tool("picture")
        assert [block.type for block in picture.content] == ["text", "image"]
        failed = await client.call_tool("fail")
        assert failed.is_error
        assert text_of(failed) == "it cannot be done"
        assert (await client.call_tool("break_down")).is_error
        assert (await client.call_tool("bump", {"by": "many"})).is_error
        with pytest.raises(MCPError) as unknown:
            await client.call_tool("nothing")
        assert unknown.value.code == types.INVALID_PARAMS
        assert (await client.call_tool("bump")).structured_content == {"result": 1}


async def test_result_over_the_limit_is_an_error(era: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(toolbox_app()) as address, await connected(address, era) as client:
        monkeypatch.setattr("servers.mcp.handlers.MAX_RESULT_CHARS", 1000)
        assert not (await client.call_tool("long", {"size": 1000})).is_error
        failed = await client.call_tool("long", {"size": 1001})
        assert failed.is_error
        assert "at most 1000" in text_of(failed)


class Ending(ToolBox):
    def before_call(self, name: str, arguments: Mapping[str, Any]) -> None:
        if self.count > 0:
            raise EpisodeOverError("the episode is over; reset")


async def test_call_after_the_episode_is_a_tool_error_not_a_protocol_error() -> None:
    app = create_app(Ending, ToolAction, ToolObservation, max_concurrent_envs=4)
    async with serving(app) as address, host(address) as client:
        assert text_of(await client.call_tool("bump")) == "1"
        for name in ("bump", "wait"):
            ended = await client.call_tool(name)
            assert ended.is_error
            assert "is over" in text_of(ended)


@pytest.mark.soak
async def test_call_whose_session_closes_before_it_awaits_leaves_nothing_behind() -> None:
    ended = threading.Event()

    class Late(ToolBox):
        def before_call(self, name: str, arguments: Mapping[str, Any]) -> None:
            ended.wait(WAIT_TIMEOUT_S)

        @tool
        async def long(self) -> str:
            return "late"

    app = create_app(Late, ToolAction, ToolObservation, max_concurrent_envs=4)
    async with serving(app) as address, host(address) as client:
        (session,) = app.sessions.standing
        call = asyncio.create_task(client.call_tool("long"))
        await eventually(lambda: session.busy)
        await app.sessions.close(session)
        with pytest.raises(MCPError):
            await call
        ended.set()
        await eventually(lambda: not app.sessions.executor.abandoned)
        gc.collect()  # what was never awaited would say so


@stateless_first
async def test_tools_of_an_instance_are_listed(era: str) -> None:
    class Growing(ToolBox):
        def list_tools(self) -> Sequence[ToolSpec]:
            return [*super().list_tools(), ToolSpec(name=f"episode_{self.episode}")]

    app = create_app(Growing, ToolAction, ToolObservation, max_concurrent_envs=4)
    app_of_factory = create_app(lambda: Growing(), ToolAction, ToolObservation, max_concurrent_envs=4)
    for served in (app, app_of_factory):
        async with serving(served) as address, host(address, mode=era) as client:
            last = (await client.list_tools()).tools[-1].name
            assert last == ("episode_0" if era == STATELESS else "episode_1")
            assert served.sessions.active == (0 if era == STATELESS else 1)


@handshake_first
async def test_resources_prompts_and_completions_are_served(era: str) -> None:
    async with serving(toolbox_app()) as address, await connected(address, era) as client:
        (template,) = (await client.list_resource_templates()).resource_templates
        assert template.uri_template == "notes://{title}"
        (held,) = (await client.read_resource("notes://first")).contents
        assert getattr(held, "text", None) == "hello"
        with pytest.raises(MCPError) as missing:
            await client.read_resource("notes://second")
        assert missing.value.code == (types.INVALID_PARAMS if era == STATELESS else -32002)
        assert "dry tone" in str(await client.get_prompt("sum_up", {"tone": "dry"}))
        for name, arguments in (("other", {}), ("sum_up", {})):
            with pytest.raises(MCPError):
                await client.get_prompt(name, arguments)
        tone = {"name": "tone", "value": "d"}
        completions = await client.complete(types.PromptReference(name="sum_up"), tone)
        assert completions.completion.values == ["dry", "drunk"]


async def abort(client: Client, tool: str, name: str) -> None:
    """Start a call, and cancel it once it runs."""
    call = await start_call(client, tool, name=name)
    call.cancel()
    await asyncio.wait([call], timeout=60)
    await eventually(lambda: name in ToolBox.cancelled)


@pytest.mark.parametrize("tool", ["wait", pytest.param("work", marks=pytest.mark.soak)])
async def test_cancelled_call_ends_and_its_session_stays(era: str, tool: str) -> None:
    app = toolbox_app()
    async with serving(app) as address, await connected(address, era) as client:
        await client.call_tool("bump", {"by": 4})
        await abort(client, tool, f"{tool} {era}")
        assert text_of(await client.call_tool("bump")) == "5"
        assert app.sessions.executor.abandoned == 0


@handshake_first
@pytest.mark.parametrize("tool", ["wait", pytest.param("work", marks=pytest.mark.soak)])
async def test_hanging_tool_ends_only_its_own_session(era: str, tool: str) -> None:
    app = toolbox_app(step_timeout_s=1.0)
    async with (
        serving(app) as address,
        await connected(address, era) as other,
        await connected(address, era) as client,
    ):
        with pytest.raises(MCPError, match="within 1 s"):
            await client.call_tool(tool, {"seconds": 3})
        with pytest.raises(MCPError):
            await client.call_tool("bump")
        assert text_of(await other.call_tool("bump")) == "1"
        await eventually(lambda: app.sessions.active == 1)


async def answer(_: Any, params: types.ElicitRequestParams) -> types.ElicitResult:
    return types.ElicitResult(action="accept", content={"name": params.message[:3].strip()})


async def think(_: Any, params: types.CreateMessageRequestParams) -> types.CreateMessageResult:
    return types.CreateMessageResult(
        role="assistant", content=types.TextContent(type="text", text="4"), model="m"
    )


async def test_tool_sends_requests_to_its_client(era: str) -> None:
    async with (
        serving(toolbox_app()) as address,
        await connected(address, era, elicitation_callback=answer, sampling_callback=think) as client,
    ):
        assert text_of(await client.call_tool("greet")) == "hello Who and And"
        assert text_of(await client.call_tool("think")) == "4"


@stateless_first
async def test_client_without_the_capability_gets_no_requests(era: str) -> None:
    async with serving(toolbox_app()) as address, await connected(address, era) as client:
        assert text_of(await client.call_tool("think")) == "nobody thinks"
        if era == HANDSHAKE:
            assert (await client.call_tool("greet")).is_error
        else:
            with pytest.raises(MCPError) as refused:
                await client.call_tool("greet")
            assert refused.value.error.data == {"requiredCapabilities": {"elicitation": {}}}


async def test_request_state_is_bound_to_session_tool_and_arguments() -> None:
    async with serving(toolbox_app()) as address:
        mine, other = await open_session(address), await open_session(address)

        async def call(handle: str, state: str | None = None, **changed: Any) -> Any:
            ann = {"who": {"action": "accept", "content": {"name": "Ann"}}}
            parameters = {
                "name": "greet",
                "request_state": state,
                "input_responses": state and ann,
                **changed,
            }
            async with host(address, f"/mcp/{handle}", STATELESS, elicitation_callback=answer) as client:
                try:
                    return await client.session.call_tool(**parameters, allow_input_required=True)
                except MCPError as error:
                    return error.error

        first = await call(mine)
        state = first.request_state
        for handle, sealed, changed in (
            (other, state, {}),
            (mine, state + "x", {}),
            (mine, state, {"arguments": {"a": 1}}),
            (mine, state, {"name": "think"}),
        ):
            refused = await call(handle, sealed, **changed)
            assert refused.code == types.INVALID_PARAMS
            assert "requestState" in refused.message
        second = await call(mine, state, input_responses={"nobody": {"action": "cancel"}})
        assert second.input_requests["who"].params.message == "Who are you?"
        third = await call(mine, second.request_state)
        assert third.input_requests["who"].params.message == "And you?"
        assert text_of(await call(mine, third.request_state)) == "hello Ann and Ann"


async def test_change_notifications_reach_listening_clients() -> None:
    methods: list[str] = []

    async def listen(message: Any) -> None:
        if isinstance(message, types.ServerNotification.__args__):  # type: ignore[attr-defined]
            methods.append(message.method)

    app = toolbox_app()
    async with serving(app) as address, host(address, message_handler=listen) as client:
        (session,) = app.sessions.standing
        capabilities = client.server_capabilities
        assert capabilities.tools
        assert capabilities.tools.list_changed
        assert capabilities.resources
        assert capabilities.resources.subscribe
        await eventually(lambda: session.listeners == 1)  # the stream of GET
        await client.list_tools()
        with pytest.warns(MCPDeprecationWarning):
            await client.subscribe_resource("notes://first")
        await client.call_tool("note", {"title": "first", "text": "a"})
        await client.call_tool("note", {"title": "second", "text": "b"})
        await eventually(lambda: len(methods) == 3)
        with pytest.warns(MCPDeprecationWarning):
            await client.unsubscribe_resource("notes://first")
        await client.call_tool("note", {"title": "first", "text": "c"})
        await client.call_tool("note", {"title": "third", "text": "d"})
        await eventually(lambda: len(methods) == 5)
    changed = ["notifications/resources/list_changed", "notifications/tools/list_changed"]
    assert methods == ["notifications/resources/updated", *changed, *changed]


async def test_change_notifications_reach_stateless_listeners() -> None:
    async with serving(toolbox_app()) as address:
        handle = await open_session(address)
        async with (
            host(address, f"/mcp/{handle}", STATELESS) as client,
            client.listen(tools_list_changed=True, resource_subscriptions=["notes://first"]) as events,
            asyncio.timeout(60),
        ):
            for title in ("first", "second"):
                note = {"title": title, "text": "x"}
                await client.call_tool("note", note)
                params = {"name": "note", "arguments": note, "session_id": handle}
                assert (await rpc(address, "tools/call", params))["result"]["is_error"] is False
            listening = aiter(events)
            event_names = [type(await anext(listening)).__name__ for _ in range(2)]
    assert event_names == ["ResourceUpdated", "ToolsListChanged"]


HALF = "half of a pair: \ud800"


class Odd(ToolBox):
    def before_call(self, name: str, arguments: Mapping[str, Any]) -> None:
        if name == "bump":
            raise EpisodeOverError(HALF)

    @resource("odd:one")
    def one(self) -> str:
        return HALF

    @resource("odd:none")
    def none(self) -> str:
        raise NoSuchResourceError(HALF)

    @prompt
    def say(self) -> str:
        return HALF

    @tool
    def told(self, context: ToolContext) -> str:
        context.progress(math.nan)
        context.progress(1, message=HALF)
        return "said"


@handshake_first
async def test_lone_surrogates_are_replaced_in_every_reply(era: str) -> None:
    app = create_app(Odd, ToolAction, ToolObservation, max_concurrent_envs=4)
    progress_events: list[Any] = []

    async def progress(done: float, _: float | None, message: str | None) -> None:
        progress_events.append((done, message))

    async with serving(app) as address, await connected(address, era) as client, asyncio.timeout(30):
        assert "a pair: ?" in text_of(await client.call_tool("bump"))
        assert "a pair: ?" in str(await client.read_resource("odd:one"))
        with pytest.raises(MCPError, match=r"a pair: \?"):
            await client.read_resource("odd:none")
        assert "a pair: ?" in str(await client.get_prompt("say"))
        assert text_of(await client.call_tool("told", progress_callback=progress)) == "said"
    assert progress_events == [(1, "half of a pair: ?")]
