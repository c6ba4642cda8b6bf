"""By which session a standard request is answered: one that it names, or one that is opened for it."""

from contextlib import suppress

from openenv_core.protocol import jsonrpc
from openenv_core.protocol.codes import Refusal
from openenv_core.protocol.http import SESSION_ID
from openenv_core.protocol.jsonrpc import Fault
from servers.execution import FATAL
from servers.mcp.asked import DISCOVER, Asked
from servers.mcp.refusals import HANDLES, Refused, no_tools, refused_by
from servers.routes.failures import reported
from servers.routes.standing import NEW
from servers.sessions import Session, SessionTable
from servers.tooling import Tooling


class Opening:
    """Finds sessions, and opens them: those that it opens have been reset.

    Args:
        sessions: Where sessions come from.
        tooling: Says whether they have tools.
    """

    def __init__(self, sessions: SessionTable, tooling: Tooling) -> None:
        self._sessions = sessions
        self._tooling = tooling

    def check(self, asked: Asked) -> None:
        """Refuse what no session could answer.

        Raises:
            Refused: The environment has no tools, or the request names two sessions.
        """
        if not self._tooling.possible:
            raise no_tools()
        if asked.in_path is not None and asked.in_header not in (None, asked.in_path):
            text = "expected one session, got one in the path and another in the header X-OpenEnv-Session"
            raise Refused(400, Fault(jsonrpc.INVALID_REQUEST, text))

    async def of_request(self, asked: Asked, owner: str) -> Session | None:
        """Return the session that a request of the stateless wire names; None where it names none.

        Raises:
            Refused: It is not there, or cannot be opened.
        """
        if asked.in_path is not None:
            return self._find(owner, asked.in_path)
        if asked.in_header is None or asked.method == DISCOVER:
            return None
        return (await self._find_or_open(owner, asked.in_header))[0]

    async def of_connection(self, asked: Asked, owner: str) -> tuple[Session, bool]:
        """Return the session of a new connection, and whether it was opened for it.

        Raises:
            Refused: It is not there, or cannot be opened.
        """
        if asked.in_path is not None:
            return self._find(owner, asked.in_path), False
        return await self._find_or_open(owner, asked.in_header)

    def _find(self, owner: str, wanted: str) -> Session:
        try:
            return self._sessions.find(owner, wanted)
        except Refusal as refusal:
            raise refused_by(refusal) from None

    async def _find_or_open(self, owner: str, wanted: str | None) -> tuple[Session, bool]:
        if wanted is not None and (wanted == NEW or SESSION_ID.fullmatch(wanted) is None):
            text = f"expected the id of a session in X-OpenEnv-Session, got {wanted[:128]!r}; {HANDLES}"
            raise Refused(400, Fault(jsonrpc.INVALID_PARAMS, text))
        if wanted is not None:
            with suppress(Refusal):
                return self._sessions.find(owner, wanted), False
        try:
            session = await (
                self._sessions.open(owner) if wanted is None else self._sessions.find_or_open(owner, wanted)
            )
        except Refusal as refusal:
            raise refused_by(refusal) from None
        if session.used:  # somebody else has opened it meanwhile
            return session, False
        try:
            await self._reset(session)  # it counts as used before anything waits
        except BaseException:
            await self._sessions.close(session)
            raise
        return session, True

    async def _reset(self, session: Session) -> None:
        if not self._tooling.has_tools(session.runner):
            raise no_tools()
        try:
            await self._sessions.call(session, lambda runner: runner.reset({}))
        except Refusal as refusal:
            raise refused_by(refusal) from None
        except FATAL as error:
            raise Refused(500, Fault(jsonrpc.INTERNAL_ERROR, reported(error))) from None
