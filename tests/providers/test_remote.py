"""The lease of a hosted sandbox, by a clock of the test's own; servers in sandboxes are in tests/servers/sandboxes."""

import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from openenv_core.errors import ConfigurationError
from openenv_core.providers import RemoteSandboxProvider, remote


def test_lost_renewal_is_followed_by_another_within_the_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    now, asked = 0.0, list[float]()

    def wait(seconds: float) -> bool:
        nonlocal now
        now += seconds
        return now >= 100

    def set_timeout(lease_s: int, request_timeout: float) -> None:
        asked.append(now)
        if len(asked) == 1:
            wait(request_timeout)
            raise TimeoutError

    lease = remote.SandboxLease(MagicMock(sandbox_id="1"), 600)
    lease.end()
    monkeypatch.setattr(remote, "time", SimpleNamespace(monotonic=lambda: now))
    inner = SimpleNamespace(set_timeout=set_timeout, sandbox_id="1")
    vars(lease).update(ended=SimpleNamespace(wait=wait), inner=inner, _lease_s=60)
    lease._renew()
    assert (asked, lease.lost) == ([20, 40, 60, 80], None)


def test_missing_client_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "e2b", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'ropewalk\[e2b\]'"):
        RemoteSandboxProvider("base", api_key="a-key-of-good-length")
