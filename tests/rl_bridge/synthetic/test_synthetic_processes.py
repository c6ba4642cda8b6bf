"""A synthetic job in real processes: everything is trained, and nobody's time is lost."""

import argparse
import json

import pytest

from rl_bridge.cli.bench import COMMAND

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(300)]


def test_whole_job_is_accounted_for(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    COMMAND.configure(parser)
    assert COMMAND.run(parser.parse_args(["throughput", "--synthetic", "--seconds", "4", "--json"])) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["steps"], found["groups"]) == (4, 32)
    assert set(found["roles"]) == {"controller", "rollout", "trainer"}
    # Milliseconds beside seconds of work and waiting, also where the machine is busy.
    assert found["unaccounted"] <= 0.02
    assert 0.3 < found["utilisation"]["trainer"] < 1.0
    waits = {row[1] for row in found["roles"]["rollout"]["seconds"]}
    assert {"assignments", "environment"} <= waits
