"""Counters for fleets: one session per process, one that kills its process, one that blocks its event loop."""

import os
import signal
import time

from counter import Add, Count, Counter

from openenv_core import EnvironmentMetadata
from servers import create_app


class Solo(Counter):
    SUPPORTS_CONCURRENT_SESSIONS = False


class Deadly(Counter):
    """A step of 0 waits forever; any other kills the process."""

    BLOCKING = True

    def step(self, action: Add) -> Count:
        if action.amount:
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()
        raise AssertionError


class Frozen(Counter):
    """A step blocks the event loop for a minute."""

    BLOCKING = False

    def step(self, action: Add) -> Count:
        os.write(1, b"it keeps the loop\n")
        time.sleep(60)
        raise AssertionError


class Described(Counter):
    """Has metadata that requires an instance."""

    BLOCKING = True

    def get_metadata(self) -> EnvironmentMetadata:
        return EnvironmentMetadata(name="described", description="by an instance")


app = create_app(Solo, Add, Count)
deadly = create_app(Deadly, Add, Count, max_concurrent_envs=64)
frozen = create_app(Frozen, Add, Count, max_concurrent_envs=4)
described = create_app(Described, Add, Count, max_concurrent_envs=4)
