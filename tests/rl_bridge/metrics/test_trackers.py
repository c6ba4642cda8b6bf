"""Weights & Biases and Trackio as they are, without a network: one run over a resumption, steps that only go up."""

import json
import os
import sqlite3
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from missing import missing
from module_run import finished

from rl_bridge.config import Config, require_trainable
from rl_bridge.errors import ConfigError
from rl_bridge.metrics.sinks import MetricsLog, TrackerSink

ROOT = Path(__file__).parents[3]
PROCESS = """
import sys
from pathlib import Path
from rl_bridge.metrics.sinks import TRACKERS, MetricsLog

name, folder, first, last, ends = sys.argv[1:]
with MetricsLog([TRACKERS[name](Path(folder), "ours", {"seed": 7, "env": {"app": "a:b"}})]) as log:
    for step in range(int(first), int(last) + 1):
        log.write(step, {"reward/mean": step / 8})
    if ends == "failed":
        raise KeyboardInterrupt
"""


def run(name: str, folder: Path, first: int, last: int, ends: str = "well") -> None:
    if find_spec(name) is None:
        missing(f"{name} is not installed: ./scripts/test --all installs it")
    folder.mkdir(exist_ok=True)
    environment = {**os.environ, "WANDB_MODE": "offline", "TRACKIO_DIR": str(folder / "trackio")}
    command = [sys.executable, "-c", PROCESS, name, str(folder), str(first), str(last), ends]
    done = finished(*command, cwd=ROOT, env=environment, timeout_s=120)
    assert (done.returncode == 0) == (ends == "well"), done.stderr[-3000:]


@pytest.mark.parametrize("left", ["", '{"id": "9f'])
def test_what_a_crash_left_of_the_tracker_s_state_does_not_keep_a_run_from_resuming(
    tmp_path: Path, left: str
) -> None:
    class Tracker(TrackerSink):
        name = "tracker"

        def _start_run(self, folder: Path, project: str, config: Any, *, resumes: bool) -> Any:
            assert not resumes

    (tmp_path / "tracker.json").write_text(left)
    Tracker(tmp_path, "ours", {})
    state = json.loads((tmp_path / "tracker.json").read_text())
    assert (len(state["id"]), state["iteration"]) == (8, 0)


@pytest.mark.slow
def test_wandb_goes_on_with_its_run(tmp_path: Path) -> None:
    folder = tmp_path / "seven"
    run("wandb", folder, 1, 3, ends="failed")
    run("wandb", folder, 2, 5)  # back to the checkpoint of iteration 1
    files = [records(path) for path in sorted(folder.glob("wandb/offline-run-*/*.wandb"))]
    assert [[one["step"] for one in file["history"]] for file in files] == [[1, 2, 3], [4, 5]]
    assert [one["reward/mean"] for file in files for one in file["history"]] == [n / 8 for n in range(1, 6)]
    assert {file["id"] for file in files} == {json.loads((folder / "wandb.json").read_text())["id"]}
    assert {(file["project"], file["name"], file["seed"]) for file in files} == {("ours", "seven", "7")}
    assert [file["exit"] for file in files] == [1, 0]


def records(path: Path) -> dict[str, Any]:
    """What an offline run's file holds: records of protobuf in LevelDB's log format, behind a header."""
    from wandb.proto import wandb_internal_pb2

    fields = dict[str, Any](history=[])
    content, at = path.read_bytes(), 7
    assert len(content) < 32_768, "a second block would begin within"
    while at + 7 <= len(content):
        size, kind_of_part = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        assert kind_of_part == 1, "expected a record in one part"
        data, at = content[at + 7 : at + 7 + size], at + 7 + size
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "history":
            items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            fields["history"].append(
                {"step": int(items["_step"]), "reward/mean": float(items["reward/mean"])}
            )
        elif kind == "run" and "id" not in fields:
            config = {item.key: item.value_json for item in record.run.config.update}
            fields.update(id=record.run.run_id, project=record.run.project, name=record.run.display_name)
            fields["seed"] = config["seed"]
        elif kind == "exit":
            fields["exit"] = record.exit.exit_code
    return fields


@pytest.mark.slow
def test_trackio_goes_on_with_its_run(tmp_path: Path) -> None:
    folder = tmp_path / "seven"
    run("trackio", folder, 1, 3, ends="failed")
    run("trackio", folder, 2, 5)
    with sqlite3.connect(folder / "trackio" / "ours.db") as database:
        rows = database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY step").fetchall()
        configs = database.execute("SELECT config FROM configs").fetchall()
    identity = json.loads((folder / "trackio.json").read_text())["id"]
    assert {name for name, *_ in rows} == {f"seven-{identity}"}
    assert [(step, json.loads(metrics)["reward/mean"]) for _, step, metrics in rows] == [
        (n, n / 8) for n in range(1, 6)
    ]
    assert json.loads(configs[0][0])["env"] == {"app": "a:b"}


class Failing(TrackerSink):
    name, _remedy = "failing", "mend it"
    logged: list[int]
    finished: bool | None = None

    def _start_run(self, *_: Any, **__: Any) -> Any:
        self.logged = []
        return self

    def log(self, metrics: dict[str, float], step: int) -> None:
        if step == 3:
            raise OSError("no server")
        self.logged.append(step)

    def _finish(self, failed: bool) -> None:
        self.finished = failed
        raise OSError("no server")


def test_training_goes_on_without_a_tracker_that_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sink = Failing(tmp_path, "ours", {})
    with MetricsLog([sink]) as log:
        for step in range(1, 6):
            log.write(step, {})
    assert (sink.logged, sink.finished) == ([1, 2], False)
    assert [line.partition(";")[0] for line in caplog.messages] == [
        "failing no longer takes metrics",
        "the run of failing could not be finished: no server",
    ]
    again = Failing(tmp_path, "ours", {})
    assert again._id == sink._id
    again.write(2, {})
    assert again.logged == []

    class NotLoggedIn(Failing):
        def _start_run(self, *_: Any, **__: Any) -> Any:
            raise RuntimeError("no API key")

    with pytest.raises(ConfigError, match=r"metrics\.sinks: failing cannot begin a run: no API key; mend it"):
        NotLoggedIn(tmp_path, "ours", {})


def test_sink_whose_package_is_missing_is_refused_with_the_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rl_bridge.config.effects.find_spec", lambda name: None)
    keys = {"env": {"app": "a:b"}, "rollout": {"task": "c:D"}, "metrics": {"sinks": ["trackio"]}}
    with pytest.raises(ConfigError, match=r"'trackio' to be installed.*pip install 'ropewalk\[trackio\]'"):
        require_trainable(Config.model_validate(keys))
