"""SIGCHLD comes for deaths, and not for every pause of an interpreter."""

import os
import signal
import sys

import pytest
from forked import in_fork

from openenv_core.sandbox.kernel import libc

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: system calls by number")


def signals_of_a_child(*, deaths_alone: bool) -> int:
    heard = 0

    def hear(*_: object) -> None:
        nonlocal heard
        heard += 1

    signal.signal(signal.SIGCHLD, hear)
    if deaths_alone:
        libc.hear_only_of_deaths()
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    os.waitpid(child, os.WUNTRACED)
    os.kill(child, signal.SIGCONT)
    os.waitpid(child, 0)
    return heard


def test_a_pause_is_not_heard_of_and_a_death_is() -> None:
    assert in_fork(lambda: signals_of_a_child(deaths_alone=True)) == 1
    assert in_fork(lambda: signals_of_a_child(deaths_alone=False)) > 1
