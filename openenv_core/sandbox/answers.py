"""What comes from an interpreter, read as what it is: bytes of whoever got hold of its descriptor."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from openenv_core.sandbox.inside.frames import ANSWER, HERE, MAX_HEADER
from openenv_core.sandbox.results import CodeError, Output

_STATUSES: Final = ("ok", "error", "memory", "rolled_back")
_KINDS: Final = ("execute_result", "display_data")
MAX_WORDS: Final = 200
"""Characters of a name: an exception's class, a mime type."""


class ForgedAnswerError(Exception):
    """No interpreter of ours writes such an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InterpreterAnswer:
    """What the interpreter says of one request.

    Attributes:
        status: "ok", "error" or "memory"; "rolled_back" where it died on the way, and the state before lives.
        exit_code: 0 to 255.
        error: The exception that ended the code.
        text: The result, or the value of a called function as tagged JSON.
        outputs: What was shown.
        truncated: Whether some of it was left out.
        count: Executions so far.
        max_rss: In bytes.
    """

    status: str
    exit_code: int
    error: CodeError | None
    text: bytes | None
    outputs: tuple[Output, ...]
    truncated: bool
    count: int
    max_rss: int


class AnswerReader:
    """Puts an answer together from what comes.

    Args:
        limit: Bytes of an answer's texts.
        announced: Whoever runs a request shows itself first by an answer of nothing.
    """

    def __init__(self, limit: int, *, announced: bool = False) -> None:
        self._limit = limit
        self._announced = announced
        self._buffer = bytearray()
        self._whole = 0

    def feed(self, data: bytes, expected: int | None) -> InterpreterAnswer | None:
        """Take some bytes; return the answer once it is whole.

        Args:
            data: What was received.
            expected: The number of the request that is being answered; None: none is.

        Raises:
            ForgedAnswerError: They are not the answer to that request.
        """
        if expected is None:
            raise ForgedAnswerError("bytes without a request")
        buffer = self._buffer
        buffer += data
        if self._announced and not self._whole:
            while buffer.startswith(HERE):
                del buffer[: len(HERE)]
        if not self._whole:
            if len(buffer) < ANSWER.size:
                return None
            head, texts = ANSWER.unpack_from(buffer)
            if head > MAX_HEADER or texts > self._limit:
                raise ForgedAnswerError(f"an answer of {head + texts} bytes")
            self._whole = ANSWER.size + head + texts
        if len(buffer) < self._whole:
            return None
        if len(buffer) > self._whole:
            raise ForgedAnswerError("bytes beyond the answer")
        head, _ = ANSWER.unpack_from(buffer)
        whole = bytes(buffer)
        self._buffer, self._whole = bytearray(), 0
        return _read(whole[ANSWER.size : ANSWER.size + head], whole[ANSWER.size + head :], expected)


def _read(head: bytes, texts: bytes, expected: int) -> InterpreterAnswer:
    try:
        said = json.loads(head)
    except (ValueError, RecursionError):
        raise ForgedAnswerError("an answer that is no JSON") from None
    try:
        if said["id"] != expected:
            raise ForgedAnswerError("the answer to another request")
        parts = _parts(texts, said["lengths"])
        text = parts.pop(0) if said["text"] is True else None
        if said["status"] not in _STATUSES:
            raise ForgedAnswerError("a status that there is not")
        return InterpreterAnswer(
            status=said["status"],
            exit_code=_number(said["exit_code"], 255),
            error=_error(said.get("error")),
            text=text,
            outputs=_outputs(said["outputs"], parts),
            truncated=said["truncated"] is True,
            count=_number(said["count"], 1 << 53),
            max_rss=_number(said["max_rss"], 1 << 53),
        )
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError, StopIteration) as error:
        raise ForgedAnswerError(f"an answer of another shape ({type(error).__name__})") from None


def _parts(texts: bytes, lengths: Any) -> list[bytes]:
    parts, begin = [], 0
    for length in lengths:
        parts.append(texts[begin : begin + _number(length, len(texts))])
        begin += length
    if begin != len(texts):
        raise ValueError(begin)
    return parts


def _outputs(said: Any, parts: list[bytes]) -> tuple[Output, ...]:
    outputs, left = [], iter(parts)
    for kind, mimes in said:
        if kind not in _KINDS:
            raise ValueError(kind)
        data = {_words(mime): next(left).decode("utf-8", "replace") for mime in mimes}
        outputs.append(Output(output_type=kind, data=data))
    if next(left, None) is not None:
        raise ValueError(parts)
    return tuple(outputs)


def _error(said: Any) -> CodeError | None:
    if said is None:
        return None
    lines = cast(Sequence[Any], said["traceback"])
    return CodeError(
        ename=_words(said["ename"]), evalue=_text(said["evalue"]), traceback=tuple(map(_text, lines))
    )


def _number(said: Any, most: int) -> int:
    if type(said) is not int or not 0 <= said <= most:
        raise ValueError(said)
    return said


def _words(said: Any) -> str:
    return _text(said)[:MAX_WORDS]


def _text(said: Any) -> str:
    if type(said) is not str:
        raise TypeError(said)
    # JSON can spell a lone surrogate, which no encoder of ours could write.
    return said if said.isascii() else said.encode("utf-8", "replace").decode()
