"""A container of a pool in somebody's hands."""

import weakref
from collections.abc import Callable
from typing import Generic, Self, TypeVar

from openenv_core.providers.pool.errors import PoolError
from openenv_core.providers.pool.stock import Member

MemberT = TypeVar("MemberT", bound=Member)


class Lease(Generic[MemberT]):
    """A container that is one caller's until it is closed; nobody gets it after that.

    One that is dropped without `close` is given back when it is collected.

    Args:
        container: The container.
        give_back: Takes it back. Must not block.
        pool: Is kept for as long as the lease: one that is collected removes all its containers.
    """

    def __init__(self, container: MemberT, give_back: Callable[[MemberT], None], pool: object) -> None:
        self._pool = pool
        self._container = container
        self._return = weakref.finalize(self, give_back, container)
        self._return.atexit = False  # all of the pool goes then

    @property
    def container(self) -> MemberT:
        """The container.

        Raises:
            PoolError: It was given back. Its port may be another's by now.
        """
        if self.closed:
            raise PoolError(
                "expected a container that is this lease's, got one that was given back; take another lease"
            )
        return self._container

    @property
    def url(self) -> str:
        """Where its server is. Raises as `container` does."""
        return self.container.url

    @property
    def closed(self) -> bool:
        """Whether it was given back."""
        return not self._return.alive

    def close(self) -> None:
        """Give the container back, to be removed and replaced. Does not wait for that. Idempotent."""
        self._return()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
