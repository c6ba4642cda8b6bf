"""What a handler of the SDK finds of the request that it serves."""

from dataclasses import dataclass
from typing import Any, Final

from mcp.server.context import ServerRequestContext

from servers.mcp.links import Link
from servers.mcp.listeners import Hub, Peer
from servers.sessions import Session

KEY: Final = "ropewalk.mcp"
"""The key of an HTTP request's scope under which its seat stands."""


@dataclass(frozen=True, slots=True)
class Seat:
    """Whose request it is, and of which session.

    Attributes:
        owner: Fingerprint of the caller's token.
        session: The session that the request is about; None where it names none.
        hub: Who listens to that session.
        peer: The client of the connection that the request came on; the stateless wire has none.
        link: That connection, where it is one of HTTP.
        named: The request names a session, which need not be there yet.
    """

    owner: str
    session: Session | None = None
    hub: Hub | None = None
    peer: Peer | None = None
    link: Link | None = None
    named: bool = True

    @property
    def binding(self) -> str:
        """What a state that travels through the caller is bound to."""
        return f"{self.owner}/{'' if self.session is None else self.session.id}"


def seat_of(ctx: ServerRequestContext[Any, Any], default: Seat | None = None) -> Seat:
    """Return the seat of the request that a handler serves; never by the SDK's own session, which others may share.

    Args:
        ctx: The handler's.
        default: The only one there is, where requests do not come by HTTP.
    """
    if ctx.request is None:
        assert default is not None
        return default
    seat: Seat = ctx.request.scope[KEY]
    return seat
