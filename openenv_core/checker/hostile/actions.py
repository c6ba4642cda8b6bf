"""Whether a server lives through whatever is sent to it as an action."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from openenv_core.checker.check import CheckFailed, Level, check
from openenv_core.checker.hostile.values import RAW, frame, split
from openenv_core.checker.subject import RunningServer, Subject
from openenv_core.checker.watching.memory import MIB, MemoryWatch
from openenv_core.client import GenericEnvClient, SyncEnvClient
from openenv_core.errors import ClientError, ConnectionLost, RequestTimeout, ServerError
from openenv_core.targets import TargetKind

DEADLINE_S: Final = 600.0

SHOWN: Final = 120
"""Characters of an action that a message shows."""


class _Frames(GenericEnvClient):
    """A client that sends what it is given."""

    async def send_frame(self, text: bytes) -> dict[str, Any]:
        """Send a frame and return the reply."""
        return await self._request(text, "observation")


@check(Level.HOSTILE, deadline_s=DEADLINE_S)
def check_valid_actions_are_survived(subject: Subject) -> None:
    """Every action that the schema allows is answered, huge and tiny values among them, and the server stays well."""
    valid, _ = split(subject)
    _bombard(
        subject,
        (frame(action) for action in valid),
        change="bound the action's fields to what the environment can do (Field(ge=, le=, max_length=)), and "
        "raise an exception for what it cannot",
    )


@check(Level.HOSTILE, deadline_s=DEADLINE_S)
def check_invalid_actions_are_survived(subject: Subject) -> None:
    """Every action that the schema does not allow is answered with a typed error, and the server stays well."""
    _, invalid = split(subject)
    _bombard(
        subject,
        (*RAW, *(frame(action) for action in invalid)),
        change="let validators of the action raise ValueError at once for whatever they do not know",
    )


def _bombard(subject: Subject, frames: Iterable[bytes], change: str) -> None:
    with _server(subject) as server, MemoryWatch(server) as memory:
        url = subject.url if server is None else server.url
        options: dict[str, Any] = {"message_timeout_s": subject.limits.step_timeout_s, "token": subject.token}
        with SyncEnvClient(_Frames(url, **options)) as client:
            subject.reset(client)
            last = b"nothing yet"
            try:
                for last in frames:
                    _send(subject, client, last)
                subject.reset(client)
                _healthy(subject, url)
            except ClientError as error:
                raise CheckFailed(_told(last, error, memory, server), change=change) from error


def _send(subject: Subject, client: Any, text: bytes) -> None:
    """Send one frame; anything but no answer will do."""
    try:
        over = client.send_frame(text).get("done")
    except ServerError:
        over = True  # some errors end the session, and a reset opens another
    if over:
        subject.reset(client)


def _told(last: bytes, error: ClientError, memory: MemoryWatch, server: RunningServer | None) -> str:
    sent = last.decode("utf-8", "replace")
    shown = sent if len(sent) <= SHOWN else f"{sent[:SHOWN]}... ({len(sent)} characters)"
    if memory.exceeded is not None:
        came = f"{memory.exceeded // MIB} MiB more memory taken, and stopped it there"
    elif server is not None and not server.alive:
        lines = server.output().strip().splitlines()
        came = "the end of the server's process" + (f": {lines[-1][:200]}" if lines else "")
    elif isinstance(error, RequestTimeout):
        came = "no answer in time"
    elif isinstance(error, ConnectionLost):
        came = "the end of the connection"
    else:
        came = f"{type(error).__name__}: {error}"
    return f"expected an observation or a typed error for {shown}, got {came}"


def _healthy(subject: Subject, url: str) -> None:
    with subject.http(url) as http:
        status = http.get("/health")
    if status.status_code != 200:
        raise CheckFailed(
            f"expected a healthy server after all of it, got {status.status_code} {status.text[:200]}",
            change="let no action change what GET /health answers",
        )


@contextmanager
def _server(subject: Subject) -> Iterator[RunningServer | None]:
    """Start a server to be ill-treated; None: there is only the one at the URL."""
    if subject.kind is TargetKind.URL:
        yield None
        return
    with subject.server() as server:
        yield server
