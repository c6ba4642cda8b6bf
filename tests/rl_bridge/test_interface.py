"""The address by which ranks on other hosts reach this one."""

import socket

import pytest

from rl_bridge.interface import own_address


def test_own_address_is_that_of_gloos_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert own_address() == "127.0.0.1"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert own_address() == socket.gethostname()
