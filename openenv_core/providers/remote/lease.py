"""A sandbox that somebody owns: its lease is renewed for as long as the owner lives, and no longer."""

import os
import threading
import time
from contextlib import suppress
from typing import Final

from openenv_core.errors import ProviderError
from openenv_core.providers.remote.api import SandboxApi
from openenv_core.providers.remote.errors import SandboxLost, SandboxRefused
from openenv_core.providers.remote.messages import SandboxState

RENEWALS: Final = 3
"""How often a lease is renewed within its time, so that one lost request costs nothing."""

JOIN_S: Final = 1.0


class LeasedSandbox:
    """A sandbox, and the thread that renews its lease.

    The thread is a daemon: with its process, whatever that dies of, the renewals end, and soon after the lease.

    Args:
        api: The service.
        sandbox_id: Which sandbox.
        lease_s: Seconds that each renewal asks for.
        delete_timeout_s: Seconds that the request to end it may take.
    """

    def __init__(self, api: SandboxApi, sandbox_id: str, lease_s: float, delete_timeout_s: float) -> None:
        self.id = sandbox_id
        self._api = api
        self._lease_s = lease_s
        self._delete_timeout_s = delete_timeout_s
        self._pid = os.getpid()
        self._lost: str | None = None
        self._ended = threading.Event()
        self._ending = threading.Lock()
        self._thread = threading.Thread(target=self._main, name="openenv-sandbox-lease", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether it was told to end."""
        return self._ended.is_set()

    @property
    def lost(self) -> str | None:
        """Why it must be taken for gone; None while its lease is kept."""
        if self._lost is None and not self._ended.is_set() and not self._thread.is_alive():
            return "the thread that renews its lease has ended"
        return self._lost

    def wait(self, seconds: float) -> bool:
        """Wait; return whether it was told to end meanwhile."""
        return self._ended.wait(seconds)

    def end(self) -> None:
        """Give it back, and let the connections go. Idempotent. Does nothing in a fork of the owner."""
        if os.getpid() != self._pid:
            return
        with self._ending:
            if self._ended.is_set():
                return
            self._ended.set()
            try:
                # A service that cannot be reached reaps it when the lease runs out.
                with suppress(ProviderError):
                    self._api.delete(self.id, self._delete_timeout_s)
            finally:
                if threading.current_thread() is not self._thread:
                    self._thread.join(JOIN_S)
                self._api.close()

    def _main(self) -> None:
        try:
            self._renew()
        except BaseException as error:
            self._lost = f"the thread that renews its lease died of {type(error).__name__}: {error}"

    def _renew(self) -> None:
        pause_s = self._lease_s / RENEWALS
        expires = time.monotonic() + self._lease_s
        while not self._ended.wait(pause_s):
            asked = time.monotonic()
            try:
                seen = self._api.renew(self.id, self._lease_s, min(self._api.timeout_s, pause_s))
            except (SandboxLost, SandboxRefused) as error:
                if not self._ended.is_set():
                    self._lost = str(error)
                return
            except ProviderError as error:
                if time.monotonic() > expires and not self._ended.is_set():
                    self._lost = f"its lease of {self._lease_s:g} s ran out: {error}"
                    return
            else:
                if seen.state is SandboxState.ENDED:
                    self._lost = f"the sandbox has ended: {seen.reason or 'no reason given'}"
                    return
                expires = asked + self._lease_s
