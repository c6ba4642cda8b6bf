"""Connections of the handshake versions: each belongs to one session, and the SDK knows it under an id of its own."""

import asyncio
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from servers.mcp.asked import SHARED
from servers.mcp.events import Kept
from servers.mcp.listeners import Peer
from servers.sessions import Session

MAX_LINKS: Final = 64
"""Connections that may share one session; beyond them the one that was used least lately has to go."""


class Link:
    """One connection.

    Args:
        session: What it speaks to.
        owns: It opened the session, whose id it goes by, and which ends with it.

    Attributes:
        id: What the client knows it by.
        inner: What the SDK knows it by; empty until the SDK has drawn it.
        peer: The client.
        kept: What it was told last.
        refused: The SDK did not take the handshake.
        posts: Requests under way.
        idle: Set while there are none.
        last_use: When one ended, by the loop's clock.
    """

    def __init__(self, session: Session, *, owns: bool) -> None:
        self.session = session
        self.owns = owns
        self.id = session.id if owns else f"{session.id}{SHARED}{secrets.token_hex(16)}"
        self.inner = b""
        self.peer = Peer()
        self.kept = Kept()
        self.refused = False
        self.posts = 0
        self.streams = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self.last_use = asyncio.get_running_loop().time()

    @contextmanager
    def in_use(self, *, stream: bool) -> Iterator[None]:
        """Count a request as long as the block runs.

        Args:
            stream: It stays open, and answers nothing that anybody waits for.
        """
        if stream:
            self.streams += 1
        else:
            self.posts += 1
            self.idle.clear()
        try:
            yield
        finally:
            self.last_use = asyncio.get_running_loop().time()
            if stream:
                self.streams -= 1
            else:
                self.posts -= 1
                if not self.posts:
                    self.idle.set()


class Links:
    """All connections of one process."""

    def __init__(self) -> None:
        self._links: dict[tuple[str, str], Link] = {}
        self._by_session: dict[Session, list[Link]] = {}

    def find(self, owner: str, link_id: str) -> Link | None:
        """Return the caller's connection of this id, once the SDK knows it too."""
        link = self._links.get((owner, link_id))
        return link if link is not None and link.inner else None

    def add(self, link: Link) -> None:
        """Count a connection from now on, and let it be found."""
        self._links[link.session.owner, link.id] = link
        self._by_session.setdefault(link.session, []).append(link)

    def remove(self, link: Link) -> bool:
        """Let it be found no more; return whether it was."""
        if self._links.get((link.session.owner, link.id)) is not link:
            return False
        del self._links[link.session.owner, link.id]
        links = self._by_session[link.session]
        links.remove(link)
        if not links:
            del self._by_session[link.session]
        return True

    def of(self, session: Session) -> list[Link]:
        """Return the connections of a session."""
        return list(self._by_session.get(session, ()))

    def superfluous(self, session: Session) -> Link | None:
        """Return the connection that has to go before another may share a session; None where none has to.

        Raises:
            Full: All are in use.
        """
        links = self.of(session)
        if len(links) < MAX_LINKS:
            return None
        unused = [link for link in links if not link.posts and not link.streams and not link.owns]
        if not unused:
            raise Full
        return min(unused, key=lambda link: link.last_use)


class Full(Exception):  # noqa: N818 - what is the case
    """A session has as many connections as it may have, and all are in use."""
