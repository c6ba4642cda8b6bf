"""What a pool and its workers say to each other: frames of a length and so many bytes."""

import json
import pickle
import socket
import struct
from dataclasses import asdict, dataclass
from typing import Any

LENGTH = struct.Struct(">I")
BEGUN = b""
"""What a worker says before it calls a function: whether a process that died had begun decides whose loss it is."""


@dataclass(kw_only=True, slots=True, frozen=True)
class RewardRequest:
    """One evaluation.

    Attributes:
        function: Which of the worker's functions.
        prompt: What the policy was shown.
        response: What it answered.
        target: What the function compares with.
    """

    function: int
    prompt: Any
    response: Any
    target: Any

    def encode(self) -> bytes:
        """The frame's content."""
        return pickle.dumps((self.function, self.prompt, self.response, self.target))

    @classmethod
    def decode(cls, data: bytes) -> "RewardRequest":
        """Of a frame that the pool sent."""
        function, prompt, response, target = pickle.loads(data)
        return cls(function=function, prompt=prompt, response=response, target=target)


@dataclass(kw_only=True, slots=True, frozen=True)
class RewardReply:
    """What came of an evaluation, or of a worker's start.

    Attributes:
        reward: The number, or None.
        error: Why there is neither; empty where there is.
        pid: The worker's.
    """

    reward: float | None = None
    error: str = ""
    pid: int = 0

    def encode(self) -> bytes:
        """The frame's content. It is read by a process that does not run code of the function's: no pickle."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> "RewardReply":
        """Of a frame that a worker sent."""
        return cls(**json.loads(data))


def send(connection: socket.socket, content: bytes) -> None:
    """Send one frame."""
    connection.sendall(LENGTH.pack(len(content)) + content)


def receive(connection: socket.socket) -> bytes | None:
    """Return the next frame's content; None where the other side has closed."""
    head = _exactly(connection, LENGTH.size)
    return None if head is None else _exactly(connection, LENGTH.unpack(head)[0])


def _exactly(connection: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        chunk = connection.recv(min(size - len(data), 1 << 20))
        if not chunk:
            return None
        data += chunk
    return bytes(data)
