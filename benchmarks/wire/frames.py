"""The part of WebSocket framing that the driver needs."""

import zlib
from typing import Final

TEXT: Final = 0x81
PING: Final = 0x89
PONG: Final = 0x8A
DEFLATED: Final = 0xC1
"""First byte of a final, compressed text frame."""

_KEY: Final = b"\x37\xfa\x21\x3d"
"""Clients must mask. With a constant key a frame is masked only once; servers do the same work."""


def masked(payload: bytes, opcode: int = TEXT) -> bytes:
    """Return one whole frame as a client sends it.

    Args:
        payload: At most 65,535 bytes.
        opcode: The frame's first byte.
    """
    size = len(payload)
    length = bytes([0x80 | size]) if size < 126 else bytes([0xFE]) + size.to_bytes(2, "big")
    key = (_KEY * (size // len(_KEY) + 1))[:size]
    # As one integer, for speed: frames with ids are masked between steps.
    body = (int.from_bytes(payload) ^ int.from_bytes(key)).to_bytes(size)
    return bytes([opcode]) + length + _KEY + body


def deflated(payload: bytes) -> bytes:
    """Return a compressed text frame that refers to no previous frame, so that it can be sent repeatedly."""
    compressor = zlib.compressobj(wbits=-15)
    body = compressor.compress(payload) + compressor.flush(zlib.Z_SYNC_FLUSH)
    return masked(body.removesuffix(b"\x00\x00\xff\xff"), DEFLATED)


def split(data: bytes) -> tuple[list[tuple[int, bytes]], bytes]:
    """Split a server's bytes into complete frames, each with its first byte, and the rest."""
    frames = []
    at = 0
    while len(data) - at >= 2:
        size, begin = data[at + 1] & 0x7F, at + 2
        if size > 125:
            width = 2 if size == 126 else 8
            if len(data) < begin + width:
                break
            size, begin = int.from_bytes(data[begin : begin + width], "big"), begin + width
        if len(data) < begin + size:
            break
        frames.append((data[at], data[begin : begin + size]))
        at = begin + size
    return frames, data[at:]
