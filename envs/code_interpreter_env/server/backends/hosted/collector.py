"""Gathers what an execution writes and shows, within the limits, while it still does so."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any, Final, Literal

from openenv_core.sandbox import CodeError, Limits, Output, SandboxFailureError, Truncated

PLAIN: Final = "text/plain"


class Collector:
    """What one execution has written and shown so far.

    Args:
        limits: Bound what is kept, and what may be written at all.

    Attributes:
        flood: Is done once more was written than may be: whoever runs the code is to stop it.
        error: The exception that the code ended with.
    """

    def __init__(self, limits: Limits) -> None:
        self.flood: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.error: CodeError | None = None
        self._limits = limits
        self._kept: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
        self._room = {"stdout": limits.output_bytes, "stderr": limits.output_bytes}
        self._cut = {"stdout": False, "stderr": False, "outputs": False}
        self._written = 0
        self._outputs: list[Output] = []
        self._outputs_room = limits.outputs_bytes
        self._result: str | None = None

    @property
    def stdout(self) -> str:
        """What is kept of stdout."""
        return self._text("stdout")

    @property
    def stderr(self) -> str:
        """What is kept of stderr."""
        return self._text("stderr")

    @property
    def result(self) -> str | None:
        """Text of the last expression's value."""
        return self._result

    @property
    def outputs(self) -> tuple[Output, ...]:
        """What was shown, in order."""
        return tuple(self._outputs)

    @property
    def truncated(self) -> Truncated:
        """What was cut."""
        return Truncated(**self._cut)

    def write(self, stream: str, text: str) -> None:
        """Take in what was written to a stream; another name than stdout is taken for stderr."""
        name = "stdout" if stream == "stdout" else "stderr"
        data = text.encode("utf-8", "replace")
        self._wrote(len(data))
        room = self._room[name]
        if room > 0 and data:
            self._kept[name].append(data[:room])
        self._room[name] = max(0, room - len(data))
        if len(data) > room:
            self._cut[name] = True

    def show(
        self,
        output_type: Literal["display_data", "execute_result"],
        bundle: Mapping[str, Any],
        metadata: Mapping[str, Any],
    ) -> None:
        """Take in a mime bundle, whole or not at all."""
        data = {str(mime): _as_text(str(mime), value) for mime, value in bundle.items() if value is not None}
        size = sum(len(mime) + len(text.encode("utf-8", "replace")) for mime, text in data.items())
        size += len(json.dumps(metadata, default=str)) if metadata else 0
        if size > self._outputs_room or len(self._outputs) >= self._limits.files:
            self._cut["outputs"] = True
            self._wrote(size)
            return
        self._outputs_room -= size
        self._outputs.append(Output(output_type=output_type, data=data, metadata=dict(metadata)))
        if output_type == "execute_result":
            self._result = data.get(PLAIN)

    def lost(self, *, stdout: bool = True, stderr: bool = True, outputs: bool = True) -> None:
        """Note that whoever runs the code has dropped some of what it wrote or showed."""
        for name, cut in (("stdout", stdout), ("stderr", stderr), ("outputs", outputs)):
            self._cut[name] = self._cut[name] or cut

    def _wrote(self, size: int) -> None:
        self._written += size
        if self._written > self._limits.output_hard_bytes and not self.flood.done():
            self.flood.set_result(None)

    def _text(self, name: str) -> str:
        # A character that the limit has cut in two is left out.
        errors = "ignore" if self._cut[name] else "replace"
        return b"".join(self._kept[name]).decode("utf-8", errors)


def _as_text(mime: str, value: Any) -> str:
    """Return one value of a bundle as text: nbformat allows lists of lines, and objects for JSON."""
    if isinstance(value, list) and not mime.endswith("json") and all(isinstance(line, str) for line in value):
        value = "".join(value)
    text = value if isinstance(value, str) else json.dumps(value)
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


class HostFailureError(SandboxFailureError):
    """The service, the gateway or the container failed; the code had no part in it.

    Attributes:
        state_lost: Whether the interpreter is gone with it.
    """

    def __init__(self, message: str, *, state_lost: bool = False) -> None:
        super().__init__(message)
        self.state_lost = state_lost


class ErrandUnansweredError(HostFailureError):
    """Our own code ran in the interpreter and said nothing that we understand: the session's code may be why."""
