"""Slots: which user each session's code runs as, among all sandboxes of this machine."""

import errno
import itertools
import socket
from typing import Final

from openenv_core.errors import ConfigurationError
from openenv_core.sandbox.kernel.identity import session_uid

_NAME: Final = "\0ropewalk-sandbox-user-{uid}"
"""Of an abstract socket, which the kernel gives to one process at a time, and takes from one that dies."""


class Slots:
    """The slots that one sandbox has taken.

    The kernel counts processes by user, and lets a user signal its own: two sandboxes must not share one. Where
    sessions have no users of their own, slots are numbers, and nobody else's business.
    """

    def __init__(self) -> None:
        self._taken: dict[int, socket.socket | None] = {}

    def __len__(self) -> int:
        return len(self._taken)

    def take(self) -> int:
        """Take the first slot that nobody on this machine has.

        Raises:
            ConfigurationError: The kernel has no such sockets.
        """
        for slot in itertools.count():
            if slot in self._taken:
                continue
            if (uid := session_uid(slot)) is None:
                self._taken[slot] = None
                return slot
            lease = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            try:
                lease.bind(_NAME.format(uid=uid))
            except OSError as error:
                lease.close()
                if error.errno != errno.EADDRINUSE:
                    raise ConfigurationError(
                        f"expected to lease a user for a session, got: {error}; sandboxes of root need Linux"
                    ) from error
                continue
            self._taken[slot] = lease
            return slot
        raise AssertionError("numbers do not end")

    def give(self, slot: int) -> None:
        """Give a slot back."""
        if (lease := self._taken.pop(slot, None)) is not None:
            lease.close()
