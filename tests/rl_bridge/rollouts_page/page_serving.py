"""The page's server in a thread of the tests."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rl_bridge.rollouts_page.server import PageServer


@contextmanager
def served(run: Path) -> Iterator[str]:
    """The address of a server of a run's page, for as long as the block lasts."""
    with PageServer(run) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server.url
        finally:
            server.shutdown()
            thread.join()
