"""Episodes that outlive their server: the journal of an episode, and its replay on another server."""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Mapping
from hashlib import blake2b
from typing import Any, Final, TypeAlias
from uuid import uuid4

from pydantic_core import from_json

from openenv_core.client.conversation import SESSION_ENDED, Conversation
from openenv_core.errors import (
    CapacityError,
    ClientError,
    ConnectionFailedError,
    ConnectionLostError,
    EpisodeLostError,
    RequestTimeoutError,
    ServerError,
)

MAX_REQUESTS: Final = 10_000
"""Requests of an episode that can be played again."""

MAX_BYTES: Final = 4 * 1024 * 1024
"""What a journal holds. Replies are kept whole as long as they fit, then as digests."""

MAX_LOSSES: Final = 3
"""Connections that one request may be under way on when they break: perhaps it is what ends the servers."""

SEED_BITS: Final = 31
"""Of the seeds that are drawn: generators of every language take so many."""

NOT_BEGUN: Final = "no reset has begun it"
"""Why an episode cannot be played again: nobody knows where it stands."""

CLOSED: Final = "this client has closed the session"
"""Likewise: nobody wants it to."""

_RETRY_S: Final = 0.05
_MAX_RETRY_S: Final = 1.0

Reply: TypeAlias = bytes | bytearray
Kept: TypeAlias = Reply | int | None
"""A reply, its digest, or None where nobody has waited for it."""


class Journal:
    """What was asked in an episode, and what came back.

    Args:
        attached: The session stands by itself, and what is under way when a connection breaks may happen there.

    Attributes:
        trouble: Why the episode cannot be played again; None where it can.
        deterministic: Whether the server of the last reset says that its environment is.
    """

    __slots__ = ("_bytes", "_entries", "_folded", "_seeds", "attached", "deterministic", "trouble")

    def __init__(self, *, attached: bool = False) -> None:
        self.attached = attached
        self._entries: list[tuple[bytes, str, Kept]] = []
        self._bytes = self._folded = 0
        self._seeds: random.Random | None = None
        self.deterministic = False
        self.trouble: str | None = NOT_BEGUN

    def clear(self, trouble: str = NOT_BEGUN) -> None:
        """Forget the episode."""
        self._entries = []
        self._bytes = self._folded = 0
        self.trouble = trouble

    def complete(self, options: Mapping[str, Any], deterministic: bool) -> Mapping[str, Any]:
        """Return the options of a reset, with a seed and an episode's id where that makes it repeatable.

        After a seed that was given, those that are drawn follow from it: a series of episodes is repeatable too.

        Args:
            options: As the caller gave them.
            deterministic: Whether the server says that its environment is.
        """
        self.deterministic = deterministic
        if not deterministic:
            return options
        seed = options.get("seed")
        if self._seeds is None or seed is not None:
            self._seeds = random.Random(seed if isinstance(seed, int) else None)
        drawn = {"seed": self._seeds.getrandbits(SEED_BITS) if seed is None else seed}
        if options.get("episode_id") is None:
            drawn["episode_id"] = str(uuid4())
        return {**options, **drawn}

    def begin(self, frame: bytes, reply: Reply) -> None:
        """Note the reset that has begun an episode."""
        self.clear()
        if self.deterministic and not self.attached:
            self.trouble = None
            self.note(frame, "observation", reply)
        else:
            self.trouble = (
                "the server does not say that its environment is deterministic (DETERMINISTIC = True)"
            )

    def note(self, frame: bytes, expected: str, reply: Reply | None) -> None:
        """Note a request that may have changed the episode.

        Args:
            frame: As it was sent.
            expected: The type of its reply.
            reply: What answered it; None where nobody has waited for that.
        """
        if self.trouble is not None:
            return
        self._entries.append((frame, expected, reply))
        self._bytes += len(frame) + (0 if reply is None else len(reply))
        if self._bytes > MAX_BYTES or len(self._entries) > MAX_REQUESTS:
            self._shrink()

    def lose(self, error: ClientError, losses: int, servers: int, *, fresh: bool) -> ClientError | None:
        """Return what is to be raised for a session that is over; None where the request can be sent in another.

        Args:
            error: Why it is over.
            losses: How many were over with this request under way.
            servers: How many can be asked.
            fresh: The request is a reset.
        """
        if isinstance(error, CapacityError) and fresh and losses < servers:
            return None  # released servers say so when the session is used
        if not isinstance(error, ConnectionFailedError | ConnectionLostError):
            self.clear()
            return error
        trouble = self.trouble
        if fresh:
            self.clear(CLOSED if trouble == CLOSED else NOT_BEGUN)
        if trouble == CLOSED or self.attached:
            return error
        if losses < MAX_LOSSES and (self.deterministic if fresh else trouble is None):
            return None
        if fresh:
            return error
        if trouble is None:
            trouble = f"this request was under way on {MAX_LOSSES} connections, and each broke"
            self.clear(trouble)
        return EpisodeLostError(f"{error}. The episode is lost: {trouble}")

    async def replay(self, conversation: Conversation) -> None:
        """Play the episode in a new session, up to where it was.

        Raises:
            EpisodeLostError: Something was answered otherwise.
            ServerError: The server has no room, or ended the session.
            ConnectionLostError: This session broke too.
            RequestTimeoutError: A reply did not come in time.
        """
        for number, (frame, expected, kept) in enumerate(self._entries):
            try:
                await conversation.ask(frame, expected)
            except SESSION_ENDED:
                raise
            except ServerError:
                pass
            reply = conversation.reply
            if kept is not None and _digest(kept) != _digest(reply):
                what = f"step {number}" if number else "the reset"
                raise EpisodeLostError(
                    f"expected {what} of the episode to be answered as before when it was played again, with "
                    f"{_shown(kept)}, got {_shown(reply)}; the environment says that it is deterministic and is not "
                    "(`ropewalk validate` looks for the cause), or the servers differ"
                )

    def _shrink(self) -> None:
        """Keep replies as digests, the oldest first; where that is not enough, give up."""
        entries = self._entries
        while self._bytes > MAX_BYTES and self._folded < len(entries):
            frame, expected, reply = entries[self._folded]
            if isinstance(reply, Reply):
                entries[self._folded] = frame, expected, _digest(reply)
                self._bytes += _DIGEST_BYTES - len(reply)
            self._folded += 1
        if self._bytes > MAX_BYTES or len(entries) > MAX_REQUESTS:
            self.clear(
                f"it is longer than {MAX_REQUESTS} requests, or these than {MAX_BYTES} bytes, which is what can be "
                "played again"
            )


async def replay(
    journal: Journal,
    lost: str | None,
    connect: Callable[[], Awaitable[Conversation]],
    abort: Callable[[str], None],
    patience_s: float,
) -> Conversation:
    """Return a session in which the episode of a journal stands where it stood.

    Args:
        journal: Of the episode.
        lost: Why its own session is gone.
        connect: Opens a session, on whichever server has room.
        abort: Ends that session.
        patience_s: Seconds that a server is looked for.

    Raises:
        EpisodeLostError: There is no such session to be had.
    """
    clock = asyncio.get_running_loop().time
    latest, pause_s = clock() + patience_s, _RETRY_S
    while True:
        try:
            conversation = await connect()
            if journal.trouble is not None:
                raise ConnectionLostError(CLOSED)
            if not conversation.carrier.deterministic:
                raise EpisodeLostError(
                    "expected a server to play the episode again on, got one that does not say that its environment "
                    "is deterministic (DETERMINISTIC = True)"
                )
            await journal.replay(conversation)
            return conversation
        except (ConnectionFailedError, ConnectionLostError, RequestTimeoutError, *SESSION_ENDED) as error:
            abort(str(lost))
            if journal.trouble is not None:
                raise ConnectionLostError(f"{CLOSED}; before, {lost}") from None
            if isinstance(error, EpisodeLostError):
                journal.clear(str(error))
                raise
            if clock() + pause_s > latest:
                trouble = (
                    f"no server was found to play the episode again on, within {patience_s:g} s: {error}"
                )
                journal.clear(trouble)
                raise EpisodeLostError(f"{lost}. The episode is lost: {trouble}") from error
        except BaseException:
            abort(str(lost))
            raise
        await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
        pause_s = min(2 * pause_s, _MAX_RETRY_S)


_DIGEST_BYTES: Final = 16


def _digest(reply: Reply | int) -> int:
    """Return what of a reply has to be the same again: observation, reward and done, or the code of an error.

    The metadata are left out, which may hold times, and the texts of errors, which may hold addresses.
    """
    if isinstance(reply, int):
        return reply
    told = json.dumps(_lasting(reply), sort_keys=True).encode()
    return int.from_bytes(blake2b(told, digest_size=_DIGEST_BYTES).digest())


def _lasting(reply: Reply) -> Any:
    message = from_json(reply)
    kind, data = message.get("type"), message.get("data")
    if kind == "error":
        return [kind, data.get("code")]
    if kind != "observation":
        return [kind, data]
    seen = data.get("observation")
    if isinstance(seen, dict):
        seen = {name: value for name, value in seen.items() if name != "metadata"}
    return [kind, seen, data.get("reward"), data.get("done", False)]


def _shown(reply: Reply | int) -> str:
    return "another reply" if isinstance(reply, int) else json.dumps(_lasting(reply)[1:])[:200]
