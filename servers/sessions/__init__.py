"""Sessions: who may come in, whose a session is, how long it lives, and when its slot comes back."""

from servers.sessions.refusals import Busy, DeadlinePassed, UnknownSession
from servers.sessions.session import Session
from servers.sessions.slots import LocalSlots, Slots
from servers.sessions.table import SessionTable

__all__ = ["Busy", "DeadlinePassed", "LocalSlots", "Session", "SessionTable", "Slots", "UnknownSession"]
