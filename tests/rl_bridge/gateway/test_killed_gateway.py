"""A gateway that is killed: its episodes are lost, have no trace and so no reward, and can be played again."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest


@contextmanager
def gateway(traces: Path) -> Iterator[tuple["subprocess.Popen[str]", httpx.Client]]:
    """Run a gateway, with a client of its owner's."""
    script = str(Path(__file__).with_name("gateway_process.py"))
    command, paths = [sys.executable, script, str(traces)], os.pathsep.join(sys.path)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths}
    ) as process:
        try:
            assert process.stdout is not None
            url, key = process.stdout.readline().split()
            with httpx.Client(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=60) as owner:
                yield process, owner
        finally:
            process.kill()


def ask(owner: httpx.Client, key: str, text: str) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": text}]}
    return owner.post("/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"})


@pytest.mark.slow  # two processes that import much
def test_episodes_of_a_killed_gateway_are_lost_and_played_again(tmp_path: Path) -> None:
    traces = tmp_path / "traces.jsonl"
    with gateway(traces) as (process, owner), ThreadPoolExecutor(1) as threads:
        key = owner.post("/episodes").json()["key"]
        assert ask(owner, key, "a").status_code == 200
        hanging = threads.submit(ask, owner, key, "hang")
        assert process.stdout is not None
        assert process.stdout.readline() == "hangs\n"
        process.send_signal(signal.SIGKILL)
        with pytest.raises(httpx.TransportError):  # no answer that an agent could take for one
            hanging.result(60)
        with pytest.raises(httpx.TransportError):  # and no reward
            owner.post("/episodes/end", json={"key": key, "reward": 0})
    assert not traces.exists()
    with gateway(traces) as (_, owner):
        assert ask(owner, key, "a").status_code == 401
        assert owner.post("/episodes/end", json={"key": key, "reward": 0}).status_code == 404
        again = owner.post("/episodes").json()["key"]
        assert ask(owner, again, "a").status_code == 200
        assert owner.post("/episodes/end", json={"key": again, "reward": 1}).status_code == 200
    (trace,) = map(json.loads, traces.read_text().splitlines())
    assert (trace["reward"], len(trace["calls"]), len(trace["rows"])) == (1.0, 1, 1)
