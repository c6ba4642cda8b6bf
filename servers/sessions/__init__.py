"""Sessions: who may come in, whose a session is, how long it lives, and when its slot comes back."""

from servers.sessions.session import Session
from servers.sessions.slots import (
    Busy,
    DeadlinePassed,
    LocalSlots,
    Slots,
    UnknownSession,
)
from servers.sessions.table import SessionTable

__all__ = ["Busy", "DeadlinePassed", "LocalSlots", "Session", "SessionTable", "Slots", "UnknownSession"]
