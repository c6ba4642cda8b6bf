"""Sessions: admission, ownership, lifetime, and the slots that bound their number."""

from servers.sessions.queue import REQUEST_WAIT_S, SlotQueue, Ticket
from servers.sessions.session import AwaitedCall, EnvironmentSession, MethodRequest, Phase
from servers.sessions.slots import (
    DeadlineExceededError,
    FullError,
    SessionBusyError,
    SessionSlots,
    UnknownSessionError,
)
from servers.sessions.table import SessionTable, new_session_id

__all__ = [
    "REQUEST_WAIT_S",
    "AwaitedCall",
    "DeadlineExceededError",
    "EnvironmentSession",
    "FullError",
    "MethodRequest",
    "Phase",
    "SessionBusyError",
    "SessionSlots",
    "SessionTable",
    "SlotQueue",
    "Ticket",
    "UnknownSessionError",
    "new_session_id",
]
