"""Servers shared by tests of the client."""

from collections.abc import Iterator

import pytest
from serve_process import serve


@pytest.fixture(scope="module")
def counter_url() -> Iterator[str]:
    """A counter in another process, with 64 slots."""
    with serve() as server:
        yield f"http://{server.address}"


@pytest.fixture(scope="module")
def solo_url() -> Iterator[str]:
    """A counter in another process, with one slot."""
    with serve(app="solo:app") as server:
        yield f"http://{server.address}"
