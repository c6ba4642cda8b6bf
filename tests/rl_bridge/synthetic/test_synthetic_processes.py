"""A synthetic job in real processes: everything is trained, and all time is accounted for."""

import argparse
import json

import pytest

from rl_bridge.cli.bench import COMMAND

pytestmark = [pytest.mark.heavy, pytest.mark.soak, pytest.mark.timeout(300)]

WINDOWS = 3
"""What a busy machine takes from a process belongs to nobody; in one of so many it takes next to nothing."""
UNACCOUNTED = 0.02


def test_whole_job_is_accounted_for(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    COMMAND.configure(parser)
    for _ in range(WINDOWS):
        assert COMMAND.run(parser.parse_args(["throughput", "--synthetic", "--seconds", "4", "--json"])) == 0
        found = json.loads(capsys.readouterr().out)
        if found["unaccounted"] <= UNACCOUNTED:
            break
    assert (found["steps"], found["groups"]) == (4, 32)
    assert set(found["roles"]) == {"controller", "rollout", "trainer"}
    assert found["unaccounted"] <= UNACCOUNTED
    assert 0.3 < found["utilisation"]["trainer"] < 1.0
    waits = {row[1] for row in found["roles"]["rollout"]["seconds"]}
    assert {"assignments", "environment"} <= waits
