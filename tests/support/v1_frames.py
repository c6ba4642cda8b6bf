"""Validates the frames of `ropewalk.v1` by their JSON Schema while a test runs."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from openenv_core.protocol import batch
from openenv_core.protocol.batch import decode_frame
from servers.routes.link import Link, LinkConversation

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
    read, send, resume = batch.read_frame, Link.send, LinkConversation.resume

    def checked_read(frame: str | bytes, *rest: Any) -> Any:
        request = read(frame, *rest)
        validate_frame(REQUEST, frame)
        counts[0] += 1
        return request

    def checked_send(self: Link, frame: str | bytes) -> None:
        validate_frame(ANSWER, frame)
        counts[1] += 1
        send(self, frame)

    def checked_resume(self: LinkConversation, link: Link, request: Any) -> None:
        sent = self.connection.send

        def checked_first(
            frame: str | bytes,
        ) -> None:  # the answer to a resume, which is no frame of the link's
            validate_frame(ANSWER, frame)
            sent(frame)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.connection, "send", checked_first)
            resume(self, link, request)

    monkeypatch.setattr(batch, "read_frame", checked_read)
    monkeypatch.setattr(Link, "send", checked_send)
    monkeypatch.setattr(LinkConversation, "resume", checked_resume)
    return counts
