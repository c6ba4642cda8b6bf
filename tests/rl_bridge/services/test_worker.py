"""The command for further hosts: addresses that it refuses. tests/clusters shows that it serves."""

import os
import sys
from types import SimpleNamespace

import pytest

from rl_bridge.interface import INTERFACE_VARIABLES
from rl_bridge.services.worker import main, serve


@pytest.mark.parametrize(
    ("address", "message"),
    [
        *(
            (address, f"worker: expected an address as tcp://HOST:PORT, got {address!r}")
            for address in ("10.0.0.2:29500", "tcp://*:29500", "tcp://10.0.0.2:0", "tcp://10.0.0.2:65536")
        ),
        ("tcp://[::]:29500", "by which other hosts reach this one, got 'tcp://[::]:29500'"),
    ],
)
def test_an_address_that_others_cannot_use_is_refused(
    address: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([address]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("address", "before", "interfaces"),
    [
        ("tcp://127.0.0.1:29500", {}, ["lo", "lo"]),
        ("tcp://127.0.0.1:29500", {"NCCL_SOCKET_IFNAME": "ib0"}, ["lo", "ib0"]),
        ("tcp://no-such-host.invalid:29500", {}, [None, None]),
    ],
)
def test_ranks_meet_where_the_host_is_reached(
    monkeypatch: pytest.MonkeyPatch, address: str, before: dict[str, str], interfaces: list[str | None]
) -> None:
    """Monarch is a stand-in that starts nothing."""
    interfaces_seen: list[list[str | None]] = []

    def run_worker_loop_forever(**_: str) -> None:
        interfaces_seen.append([os.environ.get(name) for name in INTERFACE_VARIABLES])

    environment = {name: value for name, value in os.environ.items() if name not in INTERFACE_VARIABLES}
    monkeypatch.setattr(os, "environ", environment | before)
    actor = SimpleNamespace(run_worker_loop_forever=run_worker_loop_forever)
    monkeypatch.setitem(sys.modules, "monarch", SimpleNamespace(actor=actor))
    monkeypatch.setitem(sys.modules, "monarch.actor", actor)
    serve(address)
    assert interfaces_seen == [interfaces]
