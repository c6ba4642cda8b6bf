"""Servers and folders that several tests share: starting a released server takes seconds."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest
from released import our_server, released_server, scaffold


@pytest.fixture(scope="session")
def scaffolds(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder that a release's own `init` makes."""
    return cache(lambda version: scaffold(version, tmp_path_factory.mktemp(f"scaffold-{version}")))


@pytest.fixture(scope="module")
def released_url(scaffolds: Callable[[str], Path]) -> Iterator[Callable[[str], str]]:
    """Return the URL of a release's scaffold. Servers end with the module: later tests inspect all child processes."""
    with ExitStack() as stack:

        @cache
        def of(version: str) -> str:
            folder = scaffolds(version)
            # The scaffold of 0.1 is served from inside its folder, later ones as packages.
            inside = version == "0.1.1"
            app = "server.app:app" if inside else f"{folder.name}.server.app:app"
            return stack.enter_context(released_server(version, app, folder if inside else folder.parent))

        yield of


@pytest.fixture(scope="module")
def counter_url() -> Iterator[str]:
    with our_server("counter:app") as url:
        yield url
