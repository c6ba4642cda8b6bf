"""What is said of a container that ended while its start was waited for. A stand-in for the container says how."""

from collections.abc import Iterator
from typing import Any

import pytest

from openenv_core.errors import EngineRefused, ServerStartFailed
from openenv_core.providers.docker import container, starting
from openenv_core.providers.docker.container import Container, ContainerState

KILLED = ContainerState(False, 137)
FOR_MEMORY = ContainerState(False, 137, out_of_memory=True)


class Ended(Container):
    """Is seen to have ended in one way after the other; the last one stays."""

    def __init__(self, *seen: ContainerState | Exception) -> None:
        self.image = "some:image"
        self.looks = 0
        self._seen: Iterator[ContainerState | Exception] = iter(seen)
        self._last = seen[-1]

    def state(self) -> ContainerState:
        self.looks += 1
        seen = next(self._seen, self._last)
        if isinstance(seen, Exception):
            raise seen
        return seen

    def logs(self, tail: int = 0) -> str:
        if isinstance(self._last, Exception):
            raise self._last
        return "its last words"


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container, "OOM_LOOK_S", 0.001)
    monkeypatch.setattr(container, "OOM_EVENT_S", 0.5)


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        # The engine's notice may come after the end.
        ((KILLED, KILLED, FOR_MEMORY), "exit code 137, killed for its memory; raise memory"),
        ((KILLED,), "exit code 137; something killed it: raise memory if"),
        ((ContainerState(False, 3),), "exit code 3; the output tells why"),
        ((KILLED, EngineRefused("no such container", 404, "")), "somebody removed it"),
    ],
)
def test_a_container_that_ended_at_its_start_says_why(seen: tuple[Any, ...], said: str) -> None:
    ended = Ended(*seen)
    with pytest.raises(ServerStartFailed, match=said) as told:
        starting._require_running(ended)
    assert told.value.output == ("" if said.startswith("somebody") else "its last words")
    assert ended.looks >= len(seen)


def test_one_that_ended_by_itself_is_not_waited_for() -> None:
    ended = Ended(ContainerState(False, 3))
    with pytest.raises(ServerStartFailed):
        starting._require_running(ended)
    assert ended.looks == 1
