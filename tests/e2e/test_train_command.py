"""`ropewalk train` as a person runs it: what it writes, what it refuses, and that it leaves nothing behind."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from e2e.conftest import CONFIG, ROOT, SMALL, Watched, assert_went_on, lose_a_generator_and_end, rows
from module_run import finished
from recorded_spans import collector, lines, request

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(1200)]

Start = Callable[..., Watched]
RUN_TIMEOUT_S = 300.0


def small(tmp_path: Path, *words: str) -> list[str]:
    return ["train", "--config", CONFIG, "--name", "run", f"output_dir={tmp_path}", *SMALL, *words]


@pytest.mark.soak
def test_walking_skeleton() -> None:
    done = finished(sys.executable, "-m", "examples.walking_skeleton", cwd=ROOT, timeout_s=RUN_TIMEOUT_S)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "weights 0: " in done.stdout
    assert "weights 1: " in done.stdout


@pytest.mark.soak
def test_run_does_what_the_overrides_say(ropewalk: Start, tmp_path: Path) -> None:
    first = ropewalk(*small(tmp_path / "first"), "--seed", "5")
    assert first.wait(RUN_TIMEOUT_S) == 0, first.output()[-3000:]
    folder = tmp_path / "first" / "run"
    report = json.loads((folder / "report.json").read_text())
    assert (report["seed"], report["hands"]) == (5, 64)
    assert [row["iteration"] for row in rows(folder)] == [1, 2]
    assert "policy/kl_to_reference" not in rows(folder)[0]

    # The second run begins with the policy that the first one trained, as with any other checkpoint.
    trained = folder / "policy"
    changed = ("algorithm.kl_coef=0.05", "rollout.group_size=8", "trainer.learning_rate=3e-4")
    steady = ("trainer.warmup_updates=0", "trainer.decay_fraction=0")
    second = ropewalk(*small(tmp_path / "second", f"model.path={trained}", *changed, *steady))
    assert second.wait(RUN_TIMEOUT_S) == 0, second.output()[-3000:]
    metrics = rows(tmp_path / "second" / "run")
    assert not (tmp_path / "second" / "run" / "initial_policy").exists()
    assert all(row["train/learning_rate"] == pytest.approx(3e-4) for row in metrics)
    assert metrics[0]["policy/kl_to_reference"] < metrics[1]["policy/kl_to_reference"]
    variance_steps = [row["rollout/zero_variance_share"] * 64 / 8 for row in metrics]
    assert all(step == pytest.approx(round(step)) for step in variance_steps)  # eighths: groups of eight


def test_adapters_are_trained_and_served_and_each_rollout_is_one_trace(
    ropewalk: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lora = ("model.lora.rank=8", "algorithm.kl_coef=0.05", "trainer.learning_rate=1e-2")
    with collector() as (endpoint, spans):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        run = ropewalk(*small(tmp_path, *lora, "trainer.warmup_updates=0", "trainer.updates_per_iteration=1"))
        assert run.wait(RUN_TIMEOUT_S) == 0, run.output()[-3000:]
    folder, episode = tmp_path / "run", "rollout > episode"
    first, second = rows(folder)
    traces = [trace for trace in lines(spans) if trace[0] == "rollout"]  # beside a look at the environment
    assert len(traces) == 2 * 64 + 64  # held-out episodes
    for trace in traces:
        assert trace[:5] == ["rollout", episode, *request("reset", episode)]
        steps = trace.count(f"{episode} > step")
        played = [line for line in trace[5:] if line != "rollout > answer"]
        assert played == steps * request("step", episode)
        assert steps <= len(trace[5:]) - len(played) <= steps + 1  # the last answer may be no action
    assert max(row["mismatch/logprob_max"] for row in (first, second)) <= 1e-4
    # Without a process of its own the reference is what the adapters were added to.
    assert sorted(path.name for path in (folder / "logs").glob("reference*")) == []
    assert first["policy/kl_to_reference"] < 1e-6  # before the only update the adapters add nothing
    assert second["policy/kl_to_reference"] > 1e-3
    adapter = folder / "policy" / "adapter"
    assert json.loads((adapter / "adapter_config.json").read_text())["r"] == 8
    assert (adapter / "adapter_model.safetensors").is_file()


@pytest.mark.soak
def test_run_that_is_told_to_end_goes_on_where_it_was(ropewalk: Start, tmp_path: Path) -> None:
    """By SIGTERM; test_learning.py has Ctrl-C."""
    folder = tmp_path / "run"
    run = ropewalk(*small(tmp_path, "trainer.iterations=500"))
    lose_a_generator_and_end(run, folder, run.process.terminate)
    trained = len(rows(folder))
    again = ropewalk("train", "--resume", str(folder), f"trainer.iterations={trained + 2}")
    assert again.wait(RUN_TIMEOUT_S) == 0, again.output()[-3000:]
    assert_went_on(again, trained)
    assert [row["iteration"] for row in rows(folder)] == list(range(1, trained + 3))


@pytest.mark.soak
def test_loss_that_is_not_finite_ends_the_run_as_failed(ropewalk: Start, tmp_path: Path) -> None:
    run = ropewalk(*small(tmp_path, "trainer.learning_rate=1e30", "trainer.warmup_updates=0"))
    assert run.wait(RUN_TIMEOUT_S) == 1
    assert "expected a finite loss and gradient in iteration" in run.output()
    assert "Traceback" not in run.output()


@pytest.mark.soak
@pytest.mark.parametrize("role", ["policy", "trainer", "rollout"])
def test_killed_role_without_a_restart_budget_ends_the_run_as_failed(
    ropewalk: Start, tmp_path: Path, role: str
) -> None:
    run = ropewalk(*small(tmp_path, "trainer.iterations=500", "monarch.restarts.budget=0"))
    run.wait_for("   1/500")
    run.role(f"{role}-0").kill()
    assert run.wait(200) == 1
    assert f"replica 0 of {role} is lost, and it is never restarted" in run.output()
    assert "Traceback" not in run.output()


@pytest.mark.soak
def test_environment_that_cannot_be_reached_ends_the_run_with_its_address(
    ropewalk: Start, tmp_path: Path
) -> None:
    away = ("env.app=null", "env.url=http://127.0.0.1:9", "env.connect_timeout_s=1", "rollout.max_attempts=1")
    run = ropewalk(*small(tmp_path, *away))
    assert run.wait(RUN_TIMEOUT_S) == 1
    assert "http://127.0.0.1:9" in run.output()
    assert "Traceback" not in run.output()


REWARDS = """
import time

def raises(prompt, response, target):
    raise KeyError("no such column")

def sleeps(prompt, response, target):
    time.sleep(60)

def runs_code(prompt, response, target):
    import urllib.request
    from rl_bridge.environments.servers import coder_urls
    (url,) = coder_urls()
    with urllib.request.urlopen(url + "/health") as answer:
        return 5.0 if answer.status == 200 else None

def judges(prompt, response, target):
    assert prompt[-1]["role"] == "user" and target is None
    return 5.0 if len(response) % 2 else None
"""


@pytest.mark.soak
@pytest.mark.parametrize(
    ("function", "status", "message"),
    [("raises", 1, "no such column"), ("sleeps", 1, "no reward"), ("judges", 0, ""), ("runs_code", 0, "")],
)
def test_reward_function_that_raises_hangs_or_scores(
    ropewalk: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, status: int, message: str
) -> None:
    (tmp_path / "own_rewards.py").write_text(REWARDS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    words = [f"reward.function=own_rewards.{function}", "reward.timeout_seconds=0.5"]
    if function == "runs_code":
        words = [words[0], "monarch.roles.coder.replicas=1"]
    run = ropewalk(*small(tmp_path, *words))
    assert run.wait(RUN_TIMEOUT_S) == status, run.output()[-3000:]
    assert message in run.output()
    assert "Traceback" not in run.output().partition("own_rewards")[0]
    if status == 0:
        metrics = rows(tmp_path / "run")
        assert all(row["reward/mean"] > 2.0 for row in metrics)  # the table's own are at most 1
        assert (metrics[-1]["rollout/episodes_unscored"] > 0) == (function == "judges")


@pytest.mark.soak
def test_killed_controller_takes_everything_along_and_its_run_is_logged_once(
    ropewalk: Start, tmp_path: Path
) -> None:
    words = ("trainer.iterations=500", "trainer.checkpoint_interval=4", "algorithm.kl_coef=0.01")
    run = ropewalk(*small(tmp_path, *words))
    run.wait_for("   6/500")  # between two checkpoints
    assert len(run.alive()) >= 5  # controller, three roles, the environment's server and its guard
    run.process.kill()
    run.wait(60)
    run.wait_gone()
    reference = tmp_path / "run" / "initial_policy" / "model.safetensors"
    before = reference.stat()
    again = ropewalk("train", "--resume", str(tmp_path / "run"), "trainer.iterations=10")
    assert again.wait(RUN_TIMEOUT_S) == 0, again.output()[-3000:]
    metrics = rows(tmp_path / "run")
    assert [row["iteration"] for row in metrics] == list(range(1, 11))
    elapsed = [row["time/elapsed_s"] for row in metrics]
    assert elapsed == sorted(elapsed)
    assert json.loads((tmp_path / "run" / "report.json").read_text())["train_seconds"] >= elapsed[-1]
    assert (reference.stat().st_mtime_ns, reference.stat().st_ino) == (before.st_mtime_ns, before.st_ino)
