"""Validates the frames of `ropewalk.v1` by their JSON Schema while a test runs."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from openenv_core.protocol.batch import decode_frame
from servers.routes.link import Link, LinkConversation, Links

SCHEMA: Any = json.loads((Path(__file__).parents[2] / "docs/protocol.schema.json").read_text())


def _validator(part: str) -> Any:
    return jsonschema.Draft202012Validator({"$ref": f"#/$defs/{part}", "$defs": SCHEMA["$defs"]})


REQUEST, ANSWER = _validator("request"), _validator("answer")


def validate_frame(validator: Any, frame: str | bytes) -> None:
    """Raise an error if a frame does not match the schema."""
    header, arrays = decode_frame(frame)
    if arrays:
        header["arrays"] = [{"dtype": array.dtype, "shape": list(array.shape)} for array in arrays]
    validator.validate(header)


@pytest.fixture
def validated_frames(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many frames were held: [requests that the server has taken, answers]."""
    counts = [0, 0]
    read, send, send_rest = Links.read, Link.send, LinkConversation._send_remaining
    answer_eagerly = Link.answer_eagerly

    def checked_read(self: Links, frame: str | bytes) -> Any:
        request = read(self, frame)
        validate_frame(REQUEST, frame)
        counts[0] += 1
        return request

    def checked_answer(self: Link, frame: str) -> bool:
        answered = answer_eagerly(self, frame)
        if answered:  # or else it is read like any other
            validate_frame(REQUEST, frame)
            counts[0] += 1
        return answered

    def checked_send(self: Link, frame: str | bytes) -> None:
        validate_frame(ANSWER, frame)
        counts[1] += 1
        send(self, frame)

    def checked_rest(self: LinkConversation, sent: int, first: str | None = None) -> Any:
        if first is not None:  # the answer to a resume, which is no frame of the link's
            validate_frame(ANSWER, first)
        return send_rest(self, sent, first)

    monkeypatch.setattr(Links, "read", checked_read)
    monkeypatch.setattr(Link, "answer_eagerly", checked_answer)
    monkeypatch.setattr(Link, "send", checked_send)
    monkeypatch.setattr(LinkConversation, "_send_remaining", checked_rest)
    return counts
