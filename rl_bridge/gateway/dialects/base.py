"""The interface of a dialect, and the events of a stream."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from rl_bridge.gateway.messages import GatewayError, ModelRequest, Reply, ReplyHead


class Dialect(ABC):
    """Reads a protocol's requests and writes its replies, whole or as server-sent events."""

    PING: ClassVar[bytes] = b": keep-alive\n\n"
    """Sent while an answer is sampled: a comment, which clients ignore."""

    @abstractmethod
    def read(self, body: Mapping[str, Any]) -> ModelRequest:
        """Read a request; GatewayError if it cannot be answered as it is meant."""

    @abstractmethod
    def write(self, reply: Reply, request: ModelRequest) -> dict[str, Any]:
        """Return a whole reply."""

    @abstractmethod
    def open_stream(self, head: ReplyHead, request: ModelRequest) -> Iterator[bytes]:
        """Yield the events that come before the answer is known."""

    @abstractmethod
    def stream(self, reply: Reply, request: ModelRequest) -> Iterator[bytes]:
        """Yield the events of the answer."""

    @abstractmethod
    def write_error(self, error: GatewayError) -> dict[str, Any]:
        """Return the body of an error."""

    @abstractmethod
    def stream_error(self, error: GatewayError, head: ReplyHead, request: ModelRequest) -> bytes:
        """Return the event of an error within a stream."""

    @abstractmethod
    def write_count(self, tokens: int) -> dict[str, Any]:
        """Return the reply to a request to count tokens."""


def encode(value: Any) -> bytes:
    """Return JSON as bytes."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def event(data: Any, name: str | None = None) -> bytes:
    """Return a server-sent event."""
    prefix = b"" if name is None else f"event: {name}\n".encode()
    return prefix + b"data: " + encode(data) + b"\n\n"


def dump_arguments(arguments: Mapping[str, Any]) -> str:
    """Return a call's arguments as the JSON text that OpenAI's dialects have."""
    return json.dumps(arguments, ensure_ascii=False)


def as_list(value: Any, where: str) -> list[Mapping[str, Any]]:
    """Return a list of objects; GatewayError if it is something else."""
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        raise GatewayError(f"expected {where} to be a list of objects, got {value!r:.80}")
    return value


def openai_error(error: GatewayError) -> dict[str, Any]:
    """Return an error as OpenAI's dialects have it."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": str(error), "type": kind, "param": None, "code": error.code}}
