"""The journal of an episode, and its replay on another server when its own is lost."""

import json
import random
from collections.abc import Mapping
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from uuid import uuid4

from pydantic_core import from_json

from openenv_core.client.carrier import SESSION_ENDED
from openenv_core.errors import (
    ClientError,
    ConnectionFailedError,
    ConnectionLostError,
    EpisodeLostError,
    ServerError,
)
from openenv_core.protocol.errors import NOT_EXECUTED
from openenv_core.protocol.frames import data_of

if TYPE_CHECKING:
    from openenv_core.client.conversation import Conversation, PendingCall

MAX_REQUESTS: Final = 10_000
"""Requests of an episode that a journal holds."""

MAX_BYTES: Final = 4 * 1024 * 1024
"""Size limit of a journal. Replies are kept whole while they fit, the oldest then as digests."""

MAX_LOSSES: Final = 3
"""Connections that may break during one request, which may be what kills the servers."""

NOT_BEGUN: Final = "no reset has begun it"
_NOT_DECLARED: Final = "the server does not say that its environment is deterministic (DETERMINISTIC = True)"
_TOO_LONG: Final = f"it is longer than the {MAX_REQUESTS} requests, or the {MAX_BYTES} bytes, that are kept"

_SEED_BITS: Final = 31  # random generators of every language accept as many
_DIGEST_BYTES: Final = 16

Reply: TypeAlias = bytes | bytearray


class Journal:
    """The requests of an episode and their replies.

    Args:
        attached: The session is a standing one that outlives connections, so a request in progress when the
            connection breaks may still be executed.

    Attributes:
        obstacle: Why the episode cannot be replayed; None if it can.
    """

    __slots__ = ("_bytes", "_deterministic", "_digested", "_entries", "_seeds", "attached", "obstacle")

    def __init__(self, *, attached: bool = False) -> None:
        self.attached = attached
        self.obstacle: str | None = NOT_BEGUN
        # Request, type of its reply, and the reply, its digest, or the call of a request abandoned by its caller.
        self._entries: list[tuple[bytes, str, Reply | int | PendingCall]] = []
        self._bytes = self._digested = 0
        self._deterministic = False
        self._seeds: Any = None  # the caller's last seed, or the generator of those drawn since

    def clear(self, obstacle: str = NOT_BEGUN) -> None:
        """Discard the episode."""
        self._entries = []
        self._bytes = self._digested = 0
        self.obstacle = obstacle

    def complete(self, options: Mapping[str, Any], deterministic: bool) -> Mapping[str, Any]:
        """Return the options of a reset; for a deterministic environment with a seed and an episode id added.

        Drawn seeds follow from the caller's last one, so a series of episodes is repeatable too.

        Args:
            options: The caller's options.
            deterministic: The server declares its environment deterministic.
        """
        self._deterministic = deterministic
        if not deterministic:
            return options
        if (seed := options.get("seed")) is not None:
            self._seeds = seed
        else:
            if not isinstance(self._seeds, random.Random):
                self._seeds = random.Random(self._seeds if isinstance(self._seeds, int) else None)
            seed = self._seeds.getrandbits(_SEED_BITS)
        added = {"seed": seed}
        if options.get("episode_id") is None:
            added["episode_id"] = str(uuid4())
        return {**options, **added}

    def record_reset(self, frame: bytes, call: "PendingCall") -> None:
        """Record the reset that began an episode."""
        if self._deterministic and not self.attached:
            self.clear()
            self.obstacle = None
            self.record(frame, "observation", call)
        else:
            self.clear(_NOT_DECLARED)

    def record(self, frame: bytes, expected: str, call: "PendingCall") -> None:
        """Record a request that may have changed the episode.

        Args:
            frame: The encoded request, as passed to `Conversation.send`.
            expected: The type of its reply.
            call: The request's call.
        """
        if self.obstacle is not None:
            return
        reply = call.reply_frame
        self._entries.append((frame, expected, call if reply is None else reply))
        if reply is None:
            call.on_late_reply = partial(self._add_late_reply, self._entries, len(self._entries) - 1)
        self._bytes += len(frame) + (0 if reply is None else len(reply))
        if self._bytes > MAX_BYTES or len(self._entries) > MAX_REQUESTS:
            self._shrink()

    def record_loss(self, error: ClientError, losses: int, *, fresh: bool) -> ClientError | None:
        """Record that the session was lost; return the error to raise, or None to repeat the request in another one.

        Discards the episode if the request is a reset, or if this loss makes a replay impossible.

        Args:
            error: Why the session is over.
            losses: Number of sessions lost during this request.
            fresh: The request is a reset.
        """
        obstacle, disconnected = self.obstacle, isinstance(error, ConnectionFailedError | ConnectionLostError)
        if fresh or not disconnected:
            self.clear()
        if not disconnected or self.attached:
            return error
        if losses < MAX_LOSSES and (self._deterministic if fresh else obstacle is None):
            return None
        if fresh:
            return error
        if obstacle is None:
            obstacle = f"this request was under way on {MAX_LOSSES} connections, and each broke"
            self.clear(obstacle)
        return EpisodeLostError(f"{error}. The episode is lost: {obstacle}")

    async def replay(self, conversation: "Conversation") -> None:
        """Replay the whole episode in a new session.

        Raises EpisodeLostError if a reply differs, and the errors of a request.
        """
        if not conversation.carrier.deterministic:
            raise EpisodeLostError(f"expected a server to play the episode again on, but {_NOT_DECLARED}")
        for number, (frame, expected, outcome) in enumerate(self._entries):
            recorded = outcome if isinstance(outcome, Reply | int) else outcome.reply_frame
            if recorded == b"" or (
                isinstance(recorded, Reply) and _comparable(recorded) == ["error", NOT_EXECUTED]
            ):
                continue
            call = conversation.send(frame)
            try:
                data_of(await call.future, expected)
            except ServerError as error:
                if isinstance(error, SESSION_ENDED):
                    raise
            reply = call.reply_frame or b""
            if recorded is not None and _digest(recorded) != _digest(reply):
                request_name = f"step {number}" if number else "the reset"
                raise EpisodeLostError(
                    f"expected {request_name} of the episode to be answered as before when it was played again, "
                    f"with {_excerpt(recorded)}, got {_excerpt(reply)}; the environment says that it is deterministic "
                    "and is not (`ropewalk validate` looks for the cause), or the servers differ"
                )

    def _add_late_reply(
        self, entries: list[tuple[bytes, str, "Reply | int | PendingCall"]], index: int, reply: Reply
    ) -> None:
        """Replace the call of an abandoned request by its reply, unless the episode is over."""
        if entries is not self._entries:
            return
        frame, expected, _ = entries[index]
        is_digested = index < self._digested
        entries[index] = frame, expected, _digest(reply) if is_digested else reply
        self._bytes += _DIGEST_BYTES if is_digested else len(reply)
        if self._bytes > MAX_BYTES:
            self._shrink()

    def _shrink(self) -> None:
        """Replace replies by digests, the oldest first; if that is not enough, discard the episode."""
        entries = self._entries
        while self._bytes > MAX_BYTES and self._digested < len(entries):
            frame, expected, reply = entries[self._digested]
            if isinstance(reply, Reply):
                entries[self._digested] = frame, expected, _digest(reply)
                self._bytes += _DIGEST_BYTES - len(reply)
            self._digested += 1
        if self._bytes > MAX_BYTES or len(entries) > MAX_REQUESTS:
            self.clear(_TOO_LONG)


def _digest(reply: Reply | int) -> int:
    """Return a digest of what must be equal in a replay: observation, reward and done, or an error's code.

    Metadata, which may hold times, and error texts, which may hold addresses, are left out.
    """
    if isinstance(reply, int):
        return reply
    text = json.dumps(_comparable(reply), sort_keys=True).encode()
    return int.from_bytes(blake2b(text, digest_size=_DIGEST_BYTES).digest())


def _comparable(reply: Reply) -> list[Any]:
    message = from_json(reply)
    kind, data = message.get("type"), message.get("data")
    if kind == "error":
        return [kind, data.get("code")]
    if kind != "observation":
        return [kind, data]
    observation = data.get("observation")
    if isinstance(observation, dict):
        observation = {name: value for name, value in observation.items() if name != "metadata"}
    return [kind, observation, data.get("reward"), data.get("done", False)]


def _excerpt(reply: Reply | int) -> str:
    return "another reply" if isinstance(reply, int) else json.dumps(_comparable(reply)[1:])[:200]
