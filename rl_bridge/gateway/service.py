"""A gateway by itself, for other trainers: episodes are opened and ended over HTTP, and end as traces."""

import json
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rl_bridge.gateway.app import Gateway, read_body
from rl_bridge.gateway.dialects.base import openai_error
from rl_bridge.gateway.episode import KEY_BYTES, CallSettings
from rl_bridge.gateway.messages import GatewayError
from rl_bridge.gateway.sampled import SampledEpisode
from rl_bridge.rollout.policy import ChatPolicy
from rl_bridge.tokens.conversation import join_turns

MAX_EPISODES: Final = 10_000
"""Episodes that are open at a time: an owner who ends none would fill the memory."""


def make_trace(episode: SampledEpisode, **fields: Any) -> dict[str, Any]:
    """Return an episode's calls and training rows as JSON.

    In `calls`, in their order: `parent`, the index of the call that it continues, or null; `prompt_tokens`, those that
    its prompt adds to the parent's answer; `answer_tokens`; `trained`. In `rows`: `tokens`, `logprobs` and `versions`,
    0 and -1 for a prompt's, and `answers`, the bounds of each trained answer in `tokens`.
    """
    tree = episode.tree
    index_of = {id(node): index for index, node in enumerate(tree.nodes)}
    calls = [
        {
            "parent": None if node.parent is None else index_of[id(node.parent)],
            "prompt_tokens": len(node.added),
            "answer_tokens": len(node.tokens),
            "trained": tree.is_trained(node),
        }
        for node in tree.nodes
    ]
    rows = [
        {
            "tokens": list(row.tokens),
            "logprobs": list(row.logprobs),
            "versions": list(row.versions),
            "answers": [list(bounds) for bounds in row.answers],
        }
        for row in join_turns(episode.turns())
    ]
    return {**fields, "calls": calls, "rows": rows}


@dataclass(slots=True)
class GatewayService:
    """Opens and ends a gateway's episodes for whoever has its key.

    `POST /episodes` returns `{"key": ...}`, the API key for an agent. `POST /episodes/end` takes `{"key": ...,
    "reward": ..., "metadata": {...}}`, the last two optional, ends the key and returns the trace (`make_trace`), which
    is also appended to `traces` as a line of JSON.

    Attributes:
        policy: Answers the calls.
        settings: How calls are answered.
        traces: The file for traces; None for none.
        key: The key for these two requests, which no agent should get.
    """

    policy: ChatPolicy
    settings: CallSettings
    traces: Path | None = None
    key: str = field(default_factory=lambda: f"ak-{secrets.token_urlsafe(KEY_BYTES)}")
    gateway: Gateway = field(init=False)
    _open: dict[str, SampledEpisode] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        routes = [
            Route("/episodes", self._begin, methods=["POST"]),
            Route("/episodes/end", self._end, methods=["POST"]),
        ]
        self.gateway = Gateway(routes=routes)

    async def _begin(self, request: Request) -> Response:
        try:
            self._require_key(request)
            if len(self._open) >= MAX_EPISODES:
                raise GatewayError(
                    f"{MAX_EPISODES} episodes are open; end those that are over",
                    status=HTTPStatus.TOO_MANY_REQUESTS,
                )
        except GatewayError as error:
            return JSONResponse(openai_error(error), error.status)
        episode = SampledEpisode(self.policy, self.settings)
        self.gateway.open(episode)
        self._open[episode.key] = episode
        return JSONResponse({"key": episode.key})

    async def _end(self, request: Request) -> Response:
        try:
            self._require_key(request)
            body = await read_body(request)
            reward, metadata = _read_reward(body), body.get("metadata") or {}
            episode = self._open.pop(
                str(body.get("key")), None
            )  # last: a request that is refused ends nothing
            if episode is None:
                raise GatewayError("there is no such episode", status=HTTPStatus.NOT_FOUND)
        except GatewayError as error:
            return JSONResponse(openai_error(error), error.status)
        await self.gateway.close(episode)
        trace = make_trace(episode, reward=reward, metadata=metadata)
        if self.traces is not None:
            with self.traces.open("a", encoding="utf-8") as file:
                file.write(json.dumps(trace) + "\n")
        return JSONResponse(trace)

    def _require_key(self, request: Request) -> None:
        if not secrets.compare_digest(
            request.headers.get("authorization", "").encode(), f"Bearer {self.key}".encode()
        ):
            raise GatewayError(
                "expected the key of the gateway's owner, got another one", status=HTTPStatus.UNAUTHORIZED
            )


def _read_reward(body: Mapping[str, Any]) -> float | None:
    reward = body.get("reward")
    if reward is None:
        return None
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
        raise GatewayError(f"expected a reward that is a finite number, got {reward!r:.40}")
    return float(reward)
