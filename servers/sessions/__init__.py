"""Sessions: who may come in, whose a session is, how long it lives, and when its slot comes back."""

from servers.sessions.session import EnvironmentSession
from servers.sessions.slots import (
    DeadlinePassed,
    LocalSlots,
    SessionBusyError,
    SessionSlots,
    UnknownSession,
)
from servers.sessions.table import SessionTable

__all__ = [
    "DeadlinePassed",
    "EnvironmentSession",
    "LocalSlots",
    "SessionBusyError",
    "SessionSlots",
    "SessionTable",
    "UnknownSession",
]
