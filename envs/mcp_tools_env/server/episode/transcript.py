"""What was called in an episode, kept in memory and within bounds; nothing of it is written anywhere."""

from collections import deque
from collections.abc import Mapping
from typing import Any, Final

from openenv_core.protocol.jsonio import dumps
from openenv_core.tools import ToolResult

from ...models import TranscriptEntry

MAX_ENTRIES: Final = 512
MAX_ARGUMENT_BYTES: Final = 2048
MAX_RESULT_CHARS: Final = 1024
MAX_NAME_CHARS: Final = 256


class Transcript:
    """The calls of an episode, in order.

    Args:
        kept: False keeps none.

    Attributes:
        dropped: How many of the first were given up.
    """

    def __init__(self, kept: bool) -> None:
        self._entries: deque[TranscriptEntry] = deque(maxlen=MAX_ENTRIES if kept else 0)
        self.dropped = 0

    @property
    def entries(self) -> list[TranscriptEntry]:
        """What is kept."""
        return list(self._entries)

    def add(
        self,
        tool: str,
        arguments: Mapping[str, Any] | str,
        result: ToolResult,
        started_s: float,
        seconds: float,
    ) -> None:
        """Keep a call; of arguments that cannot be kept, why."""
        if self._entries.maxlen == 0:
            return
        self.dropped += len(self._entries) == self._entries.maxlen
        self._entries.append(
            TranscriptEntry(
                tool=tool[:MAX_NAME_CHARS].encode(errors="replace").decode(),
                arguments=_short(arguments),
                outcome="ok" if result.error is None else result.error.error_type.value,
                result=_said(result),
                started_s=round(started_s, 4),
                seconds=round(seconds, 4),
                metadata=result.metadata,
            )
        )


def _short(arguments: Mapping[str, Any] | str) -> dict[str, Any] | str:
    if isinstance(arguments, str):
        return arguments
    encoded = dumps(arguments)
    return dict(arguments) if len(encoded) <= MAX_ARGUMENT_BYTES else _text(encoded, MAX_ARGUMENT_BYTES)


def _said(result: ToolResult) -> str:
    if result.error is not None:
        return result.error.message[:MAX_RESULT_CHARS]
    if isinstance(result.value, str):
        return result.value[:MAX_RESULT_CHARS]
    return "" if result.value is None else _text(dumps(result.value), MAX_RESULT_CHARS)


def _text(encoded: bytes, most: int) -> str:
    return encoded[:most].decode(errors="ignore")
