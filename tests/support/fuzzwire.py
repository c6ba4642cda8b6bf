"""WebSocket frames as bytes, valid or not, and a raw client."""

import os
import socket
import struct
from dataclasses import dataclass, field

HANDSHAKE = (
    b"GET %s HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: x3JJHMbDL1EzLkh9GBhXDw==\r\n\r\n"
)

CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10


def frame(
    payload: bytes = b"",
    opcode: int = TEXT,
    *,
    fin: bool = True,
    reserved: int = 0,
    masked: bool = True,
    declared: int | None = None,
    length_bytes: int | None = None,
) -> bytes:
    """Return a frame; the keyword arguments can make it invalid.

    Args:
        payload: The payload.
        opcode: The opcode.
        fin: Whether it is the last frame of its message.
        reserved: The three reserved bits, as a number.
        masked: Whether it is masked, as frames of clients must be.
        declared: Length in the header, if other than the payload's.
        length_bytes: Bytes of the extended length (0, 2 or 8); by default as few as needed.
    """
    size = len(payload) if declared is None else declared
    if length_bytes is None:
        length_bytes = 0 if size < 126 else 2 if size < 1 << 16 else 8
    bit = 0x80 if masked else 0
    head = bytes([(0x80 if fin else 0) | reserved << 4 | opcode])
    if length_bytes == 0:
        head += bytes([bit | size])
    elif length_bytes == 2:
        head += struct.pack("!BH", bit | 126, size)
    else:
        head += struct.pack("!BQ", bit | 127, size)
    if not masked:
        return head + payload
    mask = os.urandom(4)
    return head + mask + apply(mask, payload)


def apply(mask: bytes, payload: bytes) -> bytes:
    repeated_mask = (mask * (len(payload) // 4 + 1))[: len(payload)]
    return (int.from_bytes(payload) ^ int.from_bytes(repeated_mask)).to_bytes(len(payload))


@dataclass
class ReceivedFrames:
    """The frames that a server has sent on one connection.

    Attributes:
        frames: Opcode and payload of each complete frame.
        ended: Whether the connection has ended.
        rest: Bytes of an incomplete frame.
    """

    frames: list[tuple[int, bytes]] = field(default_factory=list)
    ended: bool = False
    rest: bytes = b""

    @property
    def texts(self) -> list[bytes]:
        return [payload for opcode, payload in self.frames if opcode == TEXT]

    @property
    def close_code(self) -> int | None:
        for opcode, payload in self.frames:
            if opcode == CLOSE:
                return int.from_bytes(payload[:2]) if len(payload) >= 2 else 1005
        return None


class RawClient:
    """A client that completes the handshake, then sends raw bytes."""

    def __init__(self, port: int, patience_s: float = 20.0, path: bytes = b"/ws") -> None:
        self.connection = socket.create_connection(("127.0.0.1", port), timeout=patience_s)
        self.connection.sendall(HANDSHAKE % path)
        head = b""
        while b"\r\n\r\n" not in head:
            part = self.connection.recv(65_536)
            assert part, f"expected an answer to the handshake, got {head!r} and the end"
            head += part
        self.head, _, rest = head.partition(b"\r\n\r\n")
        assert self.head.startswith(b"HTTP/1.1 101 "), self.head
        self.heard = ReceivedFrames(rest=rest)
        self._taken = 0
        self._parse()

    def __enter__(self) -> "RawClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    def send(self, data: bytes) -> bool:
        """Send bytes; return whether the connection was still open."""
        try:
            self.connection.sendall(data)
        except ConnectionError:
            return False
        return True

    def next_frame(self) -> tuple[int, bytes] | None:
        """Wait for the next frame; None if the connection has ended."""
        while len(self.heard.frames) == self._taken:
            if not self._read():
                return None
        self._taken += 1
        return self.heard.frames[self._taken - 1]

    def to_the_end(self) -> ReceivedFrames:
        """Read until the server closes the connection."""
        while self._read():
            pass
        return self.heard

    def _read(self) -> bool:
        try:
            part = self.connection.recv(1 << 20)
        except ConnectionError:
            part = b""
        if not part:
            self.heard.ended = True
            return False
        self.heard.rest += part
        self._parse()
        return True

    def _parse(self) -> None:
        while True:
            data = self.heard.rest
            if len(data) < 2:
                return
            size, start = data[1], 2
            assert size < 128, "a server's frames are not masked"
            if size == 126:
                size, start = int.from_bytes(data[2:4]), 4
            elif size == 127:
                size, start = int.from_bytes(data[2:10]), 10
            if len(data) < start + size:
                return
            self.heard.frames.append((data[0] & 0x0F, data[start : start + size]))
            self.heard.rest = data[start + size :]
