"""The routes of the released page, and the manager passed to Gradio pages; both play in sessions of the table."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any, Final

from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.websockets import WebSocket

from openenv_core import EnvironmentMetadata
from openenv_core.protocol.errors import RefusalError
from openenv_core.protocol.frames import (
    READ_STATE,
    RequestDecoder,
    Reset,
    encode_model,
    encode_observation,
    read_json,
)
from openenv_core.protocol.jsonio import dumps
from servers.execution import FATAL
from servers.routes.http import (
    answer_request,
    json_answer,
    json_body,
    refusal_response,
    report_error,
    requested_session_id,
    respond,
    while_connected,
)
from servers.security import owner_of
from servers.sessions import AwaitedCall, EnvironmentSession, MethodRequest, SessionTable

WEB_SESSION: Final = "web"
"""Id of the session of callers that name none: the released server has one session for all visitors."""

_MAX_LOGS: Final = 1000

_MAX_SENT_LOGS: Final = 20
"""Last steps in a frame of `/ws/ui`: each step sends them all again."""

_visitor: ContextVar[tuple[str, str]] = ContextVar("visitor of the page", default=("", WEB_SESSION))
"""Owner and id of the current request's session."""


class ActionLog(BaseModel):
    """One step, in the format of released pages."""

    model_config = ConfigDict(defer_build=True)

    timestamp: str
    action: dict[str, Any]
    observation: dict[str, Any]
    reward: float | None = None
    done: bool = False
    step_count: int = 0


class EpisodeState(BaseModel):
    """The episode of one session, in the format of released pages."""

    model_config = ConfigDict(defer_build=True)

    episode_id: str | None = None
    step_count: int = 0
    current_observation: dict[str, Any] | None = None
    action_logs: list[ActionLog] = []
    is_reset: bool = True


@dataclass(slots=True)
class _Visit:
    """A session with its episode and the state after its last call."""

    session: EnvironmentSession
    episode: EpisodeState = field(default_factory=EpisodeState)
    state: dict[str, Any] | None = None


class WebInterfaceManager:
    """Resets and steps for pages, in one session per visitor of a Gradio page and per session named on `/web`.

    A session takes a slot; it is opened by its first call and ends when it is idle for too long.

    Args:
        about: Returns the environment's metadata for a caller.
        send_timeout_s: Seconds that a watcher may leave a frame unread.
    """

    def __init__(
        self,
        sessions: SessionTable,
        decoder: RequestDecoder[Any],
        action_cls: Any,
        about: Callable[[str], Awaitable[EnvironmentMetadata]],
        send_timeout_s: float,
    ) -> None:
        self.action_cls = action_cls
        self.visitor: Callable[[], tuple[str, str] | None] = lambda: None
        self._sessions = sessions
        self._decoder = decoder
        self._about = about
        self._send_timeout_s = send_timeout_s
        self._visits: dict[tuple[str, str], _Visit] = {}
        self._changed = asyncio.Event()

    @property
    def env(self) -> Any:
        """The environment of the visitor's session; RuntimeError if there is no session yet."""
        return self._require_visit().session.environment

    @property
    def episode_state(self) -> EpisodeState:
        """The episode of the visitor's session."""
        visit = self._visits.get(self._key())
        return EpisodeState() if visit is None or visit.session.ended else visit.episode

    async def reset_environment(self, reset_kwargs: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Reset with the environment's options; return the observation in its wire format."""
        return await self._play(Reset(dict(reset_kwargs or {})))

    async def step_environment(self, action_data: Mapping[str, Any]) -> dict[str, Any]:
        """Take a step; `arguments` given as text, as forms send them, are parsed as JSON."""
        data = dict(action_data)
        if isinstance(data.get("arguments"), str):
            data["arguments"] = read_json(data["arguments"].encode())
        action = self._decoder.action(data, len(dumps(data)))
        sent = action.model_dump(mode="json", exclude={"metadata"})  # the environment may change it
        return await self._play(action, sent)

    def get_state(self) -> dict[str, Any]:
        """Return the state after the visitor's last call; RuntimeError if there was none."""
        state = self._require_visit().state
        if state is None:
            raise RuntimeError("Call reset() first")
        return state

    async def _run_sync_in_thread_pool(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a function as a call of the visitor's session; released pages use this name."""
        visit = await self._open_visit()
        return await visit.session.perform(AwaitedCall(partial(func, *args, **kwargs), on_loop=False))

    async def _play(self, request: Any, action: dict[str, Any] | None = None) -> dict[str, Any]:
        """Have the visitor's session answer a reset, or a step with this action; return the observation as sent."""
        visit = await self._open_visit()
        # Submitted together: no call of another visitor comes between them.
        replies: tuple[dict[str, Any], dict[str, Any]] = await asyncio.gather(
            answer_request(visit.session, request, _envelope),
            answer_request(visit.session, READ_STATE, _state),
        )
        reply, state = replies
        steps, logs = int(state.get("step_count") or 0), []
        if action is not None:
            log = ActionLog(timestamp=datetime.now().isoformat(), action=action, step_count=steps, **reply)
            logs = [*visit.episode.action_logs, log][-_MAX_LOGS:]
        visit.state = state
        visit.episode = EpisodeState(
            episode_id=state.get("episode_id"),
            step_count=steps,
            current_observation=reply["observation"],
            action_logs=logs,
            is_reset=action is None,
        )
        self._changed.set()  # wakes the watchers
        self._changed = asyncio.Event()
        return reply

    def _key(self) -> tuple[str, str]:
        return self.visitor() or _visitor.get()

    def _require_visit(self) -> _Visit:
        visit = self._visits.get(self._key())
        if visit is None or visit.session.ended:
            raise RuntimeError("there is no session; call reset_environment first")
        return visit

    async def _open_visit(self) -> _Visit:
        """Return the visitor's session; open one if there is none."""
        key = self._key()
        session = await self._sessions.find_or_open(*key)
        visit = self._visits.get(key)
        if visit is None or visit.session is not session:
            self._visits = {
                visit_id: known for visit_id, known in self._visits.items() if not known.session.ended
            }
            visit = self._visits[key] = _Visit(session)
        return visit

    # Routes of the released page

    def routes(self) -> list[BaseRoute]:
        """Return the routes: `/web/reset`, `/web/step`, `/web/state`, `/web/metadata`, and `/ws/ui`."""
        return [
            Route("/web/reset", self._route(self._serve_reset), methods=["POST"]),
            Route("/web/step", self._route(self._serve_step), methods=["POST"]),
            Route("/web/state", self._route(self._serve_state)),
            Route("/web/metadata", self._route(self._serve_metadata)),
            WebSocketRoute("/ws/ui", self._watch),
        ]

    def _route(self, work: Callable[[Request], Awaitable[Any]]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            try:
                _visitor.set((owner_of(request.scope), requested_session_id(request) or WEB_SESSION))
                return json_answer(dumps(await work(request)))
            except RefusalError as refusal:
                return refusal_response(refusal, self._sessions.metrics)
            except FATAL as error:
                # The released server answers 409 when an environment has no state before its first reset.
                early = isinstance(error, RuntimeError) and request.method == "GET"
                return json_answer(dumps({"detail": report_error(error)}), 409 if early else 500)

        async def serve(request: Request) -> Response:
            return await respond(request, answer(request))

        return serve

    async def _serve_reset(self, request: Request) -> dict[str, Any]:
        return await self.reset_environment(_object(await json_body(request)))

    async def _serve_step(self, request: Request) -> dict[str, Any]:
        data = _object(await json_body(request))
        if "message" not in data:
            action = data.get("action", {})
            return await self.step_environment(action if isinstance(action, dict) else {})
        visit = await self._open_visit()
        if not visit.session.has_method("message_to_action"):
            return await self.step_environment({"message": data["message"]})
        action = await answer_request(visit.session, MethodRequest("message_to_action", (data["message"],)))
        tokens: Any = getattr(action, "tokens", None)
        return await self.step_environment(
            {"tokens": tokens.tolist()}
            if hasattr(tokens, "tolist")
            else action.model_dump(exclude={"metadata"})
        )

    async def _serve_state(self, _: Request) -> dict[str, Any]:
        visit = await self._open_visit()
        state: dict[str, Any] = await answer_request(visit.session, READ_STATE, _state)
        visit.state = state
        return state

    async def _serve_metadata(self, request: Request) -> dict[str, Any]:
        return (await self._about(owner_of(request.scope))).model_dump(mode="json")

    async def _watch(self, socket: WebSocket) -> None:
        """Send the episode now and whenever it changes; incoming messages are ignored."""
        await socket.accept()

        async def send_changes() -> bool:
            _visitor.set((owner_of(socket.scope), WEB_SESSION))
            sent = None
            while True:
                changed, episode = self._changed, self.episode_state
                if episode != sent:
                    sent = episode
                    latest = episode.model_copy(update={"action_logs": episode.action_logs[-_MAX_SENT_LOGS:]})
                    frame = {"type": "state_update", "episode_state": latest.model_dump()}
                    async with asyncio.timeout(self._send_timeout_s or None):
                        await socket.send_text(json.dumps(frame))
                await changed.wait()

        await while_connected(socket.receive, send_changes())


def _object(body: bytes) -> dict[str, Any]:
    data = read_json(body) if body else {}
    return data if isinstance(data, dict) else {}


def _state(state: Any) -> dict[str, Any]:
    """Return a state in its wire format."""
    data: dict[str, Any] = json.loads(encode_model(state))
    return data


def _envelope(observation: Any) -> dict[str, Any]:
    """Return an observation in its wire format."""
    data: dict[str, Any] = json.loads(encode_observation(observation))["data"]
    return data
