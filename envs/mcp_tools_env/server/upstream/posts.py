"""Requests over HTTP that may be given up: the one that a tool is called with, when it takes too long.

Up to MCP 2025-11-25 a call is cancelled by a message of its own, and its request stays open for as long as its server
likes. A policy that calls what hangs would use up the connections that a session has, and then look like the victim
of an unreachable server. So a request ends here with the message that cancels it.
"""

import json
from collections.abc import Awaitable
from typing import Any, Final, TypeVar

import anyio

T = TypeVar("T")

_CANCELLED: Final = "notifications/cancelled"


class GivenUp(Exception):  # noqa: N818 - says what happened
    """Nobody waits for the request any more."""


class Post:
    """One request, while anybody waits for it."""

    def __init__(self) -> None:
        self._scope: anyio.CancelScope | None = None
        self._over = False

    def give_up(self) -> None:
        """End it, and whoever waits in it."""
        self._over = True
        if self._scope is not None:
            self._scope.cancel()

    async def within(self, work: Awaitable[T]) -> T:
        """Wait for a part of it.

        Raises:
            GivenUp: It was given up before, or meanwhile.
        """
        with anyio.CancelScope() as self._scope:
            if self._over:
                self._scope.cancel()
            return await work
        raise GivenUp


class Posts:
    """The requests of one connection, by the ids of their messages."""

    def __init__(self) -> None:
        self._open: dict[Any, Post] = {}

    def begin(self, body: bytes) -> tuple[Any, Post]:
        """Note a request; one that cancels another ends that."""
        message = json.loads(body) if body else {}
        if message.get("method") == _CANCELLED:
            other = self._open.pop((message.get("params") or {}).get("requestId"), None)
            if other is not None:
                other.give_up()
        post = Post()
        number = message.get("id") if "method" in message else None
        if number is not None:
            self._open[number] = post
        return number, post

    def end(self, number: Any, post: Post) -> None:
        """Forget a request."""
        if self._open.get(number) is post:
            del self._open[number]
