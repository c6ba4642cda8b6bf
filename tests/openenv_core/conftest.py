"""Servers that tests of the client share."""

from collections.abc import Iterator

import pytest
from serve_process import serve


@pytest.fixture(scope="module")
def counter_url() -> Iterator[str]:
    """A counter in a process of its own, with room for 64 sessions."""
    with serve() as server:
        yield f"http://{server.address}"


@pytest.fixture(scope="module")
def solo_url() -> Iterator[str]:
    """A counter in a process of its own that takes one session at a time."""
    with serve(app="solo:app") as server:
        yield f"http://{server.address}"
