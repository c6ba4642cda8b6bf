"""The environment under test: its application, its servers, its actions, its episodes."""

from openenv_core.checker.subject.episode import REFUSED_AT_MOST, REFUSING, Client, Episode, plain, refusing
from openenv_core.checker.subject.limits import Limits
from openenv_core.checker.subject.server import RunningServer
from openenv_core.checker.subject.subject import SLOT_WAIT_S, Subject

__all__ = [
    "REFUSED_AT_MOST",
    "REFUSING",
    "SLOT_WAIT_S",
    "Client",
    "Episode",
    "Limits",
    "RunningServer",
    "Subject",
    "plain",
    "refusing",
]
