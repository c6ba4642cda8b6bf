"""The command that runs on further hosts: what it refuses. That it serves is shown by tests/clusters."""

import pytest

from rl_bridge.services.worker import main


@pytest.mark.parametrize(
    "address",
    [
        *("10.0.0.2:29500", "tcp://10.0.0.2", "tcp://*:29500", "tcp://a b:1", "ipc://x", "tcp://:29500"),
        *("tcp://10.0.0.2:0", "tcp://10.0.0.2:65536", "tcp://10.0.0.2:99999"),
    ],
)
def test_an_address_that_nobody_could_use_is_refused(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([address]) == 2
    assert f"worker: expected an address as tcp://HOST:PORT, got {address!r}" in capsys.readouterr().err


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:29500", "tcp://[::]:29500"])
def test_an_address_that_every_host_has_is_nobodys(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([address]) == 2
    assert f"by which other hosts reach this one, got {address!r}" in capsys.readouterr().err
