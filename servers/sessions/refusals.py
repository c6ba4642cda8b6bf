"""What a table of sessions refuses, as types, since transports answer each in a way of their own."""

from openenv_core.protocol.codes import EXECUTION_ERROR, SESSION_ERROR, Refusal
from openenv_core.protocol.faults import short


class UnknownSession(Refusal):
    """There is no such session, or it is somebody else's: the answer is the same."""

    def __init__(self, session_id: str) -> None:
        super().__init__(SESSION_ERROR, f"Unknown session_id: {short(session_id)}")


class Busy(Refusal):
    """Too many calls wait for one session, which lives."""

    def __init__(self, waiting: int) -> None:
        text = f"expected one call at a time in a session, got {waiting} that wait already; try again later"
        super().__init__(EXECUTION_ERROR, text)


class DeadlinePassed(Refusal):
    """The environment took too long, and its session has been ended for that."""

    def __init__(self, limit_s: float | None) -> None:
        text = f"expected the environment to answer within {limit_s:g} s, and it did not; its session has been ended"
        super().__init__(SESSION_ERROR, text)
