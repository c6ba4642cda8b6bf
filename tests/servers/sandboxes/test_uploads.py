"""Bodies of uploads: compressed, in forms, and cut."""

import gzip
from unittest.mock import AsyncMock

import pytest
from starlette.requests import Request

from servers.sandboxes import envd
from servers.sandboxes.guest import Guest, GuestError


def request_of(*pieces: bytes, **headers: str) -> Request:
    """Return an upload, whose body comes in pieces."""
    messages = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
    receive = AsyncMock(side_effect=[*messages, {"type": "http.request", "body": b"", "more_body": False}])
    raw = [(name.replace("_", "-").encode(), text.encode()) for name, text in headers.items()]
    return Request({"type": "http", "method": "POST", "headers": raw}, receive)


@pytest.mark.parametrize("step", [1, 7, 1 << 30])
async def test_upload_of_gzip_is_unpacked_whole_or_refused(
    step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(envd, "FILE_PIECE", 64)
    whole = gzip.compress(b"one " * 100) + gzip.compress(b"") + gzip.compress(b"two")

    async def unpack(body: bytes) -> bytes:
        pieces = (body[at : at + step] for at in range(0, len(body), step))
        unpacked = [data async for data in envd._decompress(request_of(*pieces, content_encoding="gzip"))]
        assert max(map(len, unpacked)) <= 64
        return b"".join(unpacked)

    assert await unpack(whole) == b"one " * 100 + b"two"
    for cut in (whole[:-1], whole[:-8], whole[:20], b""):
        with pytest.raises(GuestError, match="ends too early"):
            await unpack(cut)
    for wrong in (whole + b"more", whole + bytes(2), whole[:-1] + b"x", b"plain"):
        with pytest.raises(GuestError, match="expected a body of gzip"):
            await unpack(wrong)


def test_form_that_is_cut_is_refused() -> None:
    kind = "multipart/form-data; boundary=b"
    parts = b"".join(b'--b\r\nContent-Disposition: form-data; filename="%d"\r\n\r\nx\r\n' % n for n in (1, 2))
    assert envd._form_files(kind, parts + b"--b--\r\n") == [("1", b"x"), ("2", b"x")]
    for cut in (parts, parts + b"--b", parts[:-4]):
        with pytest.raises(GuestError, match="ends too early"):
            envd._form_files(kind, cut)


async def test_input_that_is_cut_is_refused() -> None:
    guest = AsyncMock(Guest)
    message = b'{"event": {"start": {"process": {"pid": 1}}}}'
    frame = bytes([0, *len(message).to_bytes(4, "big")]) + message
    assert [each async for each in envd._take_input(guest, request_of(frame))] == [{}]
    with pytest.raises(GuestError, match="ends too early"):
        [each async for each in envd._take_input(guest, request_of(frame, frame[:-1]))]
