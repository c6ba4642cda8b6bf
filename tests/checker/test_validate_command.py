"""`ropewalk validate` as its users meet it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from module_run import finished
from subjects import folder_with

from openenv_core.checker.check import checks
from openenv_core.cli.main import main
from openenv_core.guard import guard_command

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "validate.md"

APP = """\
from subjects import Walk, Loose, Seen, WalkState
from servers import create_app

app = create_app(Walk, Loose, Seen, env_name="walk", max_concurrent_envs=8, state_cls=WalkState)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: Any) -> Path:
    """A folder whose only fault is that its action ignores unknown keys."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'tests' / 'support'}{os.pathsep}{ROOT}")
    made = folder_with(tmp_path / "walk_env")
    (made / "server" / "app.py").write_text(APP)
    return made


def validate(*words: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    return finished(sys.executable, "-m", "openenv_core.cli", "validate", *words, cwd=cwd, timeout_s=250)


def test_without_the_checker_s_packages_the_extra_is_named(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    assert main(["validate", "blackjack"]) == 2
    captured = capsys.readouterr()
    assert "not installed: jsonschema; pip install 'ropewalk[author]'" in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no target is given"),
        (["nosuchenvironment"], "there are:"),
        (["./nosuch"], "there is no folder or file"),
        (["/"], "got neither openenv.yaml nor server/app.py there"),
        (["nosuch.module:app"], "Could not import"),
        (["http://127.0.0.1:1"], "start it first"),
        (["blackjack", "--check", "episode_end"], "did you mean 'episode_ends'"),
        (["blackjack", "--start-timeout", "inf"], "start_timeout_s: Input should be a finite number"),
    ],
)
def test_wrong_usage_and_missing_targets_are_status_2(
    arguments: list[str], message: str, capsys: Any, monkeypatch: Any, tmp_path: Path
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no-engine.sock")
    assert main(["validate", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_findings_are_status_1_in_json(folder: Path) -> None:
    words = ["--check", "models_derived", "--check", "manifest-valid", "--json"]
    done = validate(str(folder), *words, cwd=folder)
    assert done.returncode == 1
    statuses = {one["check"]: one["status"] for one in json.loads(done.stdout)["results"]}
    assert statuses == {"models_derived": "failed", "manifest_valid": "passed"}


@pytest.mark.slow
def test_a_good_environment_passes_every_level(folder: Path) -> None:
    (folder / "server" / "app.py").write_text(APP.replace("Loose", "Go"))
    done = validate(str(folder), "--sessions", "4", "--episodes", "30", "--fuzz", "10", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    for check in ("models_derived", "episode_ends", "same_seed_in_another_process", "sessions_are_separate"):
        assert f"✓ {check}" in done.stdout
    assert "failed" not in done.stdout


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_a_command_that_is_ended(folder: Path, number: signal.Signals) -> None:
    app = folder / "server" / "app.py"
    app.write_text(f"import time\n{APP}Walk.step = lambda self, action: time.sleep(3600)\n")
    words = [sys.executable, "-m", "openenv_core.cli", "validate", str(folder), "--level", "runtime"]
    temporary = folder.parent / "temporary"
    temporary.mkdir()
    variables = {**os.environ, "TMPDIR": str(temporary)}
    process = subprocess.Popen(words, cwd=folder, env=variables, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if "schema_valid" in line:  # the next one plays, and hangs
            break
    (place,) = temporary.iterdir()
    (place / "kept_by_the_check").touch()
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= 3  # what runs the checks, what watches over the server, the server
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    if number is signal.SIGINT:
        assert process.returncode == 130
        assert "interrupted after" in out
    _, alive = psutil.wait_procs(family, timeout=40)
    assert not alive
    assert list(temporary.rglob("*")) == []


@pytest.mark.slow
def test_an_environment_that_ends_the_process_that_plays_it_is_a_finding(folder: Path) -> None:
    app = folder / "server" / "app.py"
    app.write_text(f"import os\nprint('noise')\n{APP}Walk.step = lambda self, action: os._exit(7)\n")
    names = ["schema_valid", "rewards_valid", "manifest_valid", "episode_ends", "reset_forgets"]
    words = [word for name in names for word in ("--check", name)]
    done = validate(str(folder), *words, "--json", cwd=folder)
    assert done.returncode == 1
    found = {one["check"]: one for one in json.loads(done.stdout)["results"]}
    assert "ended with status 7" in found["rewards_valid"]["message"]
    assert "no os._exit" in found["rewards_valid"]["change"]
    statuses = {name: found[name]["status"] for name in names}
    # Each process that plays it ends; the next check is run by another one.
    expected = ("passed", "failed", "passed", "failed", "failed")
    assert statuses == dict(zip(names, expected, strict=True))


@pytest.mark.soak
def test_a_process_that_never_lets_go_of_the_interpreter_is_ended(monkeypatch: Any) -> None:
    from openenv_core.checker import runner as isolation
    from openenv_core.checker.check import Check
    from openenv_core.checker.subject import CheckLimits
    from openenv_core.targets import target_of

    monkeypatch.setattr(isolation, "DEADLINE_MARGIN_S", 1.0)
    # A process that is stopped says as little as one that is stuck in compiled code.
    stuck = str(Path(__file__).with_name("stuck_python"))
    monkeypatch.setattr(isolation, "module_command", lambda _: (stuck,))
    (first,) = [one for one in checks() if one.name == "schema_valid"]
    hurried = Check(first.name, first.level, first.description, 0.5, first.function)
    results: list[Any] = []
    isolation.run_isolated(target_of("blackjack"), CheckLimits(), [hurried], on_result=results.append)
    assert "never releases the GIL" in results[0].message


@pytest.mark.soak
def test_an_author_s_own_pytest_has_the_same_checks(folder: Path) -> None:
    tests = folder / "tests"
    tests.mkdir()
    (tests / "test_checks.py").write_text(
        "from pathlib import Path\n"
        "from openenv_core.checker.suite import *\n"
        "subject = environment_subject(\n"
        "    Path(__file__).parents[1], levels=['static', 'runtime'], skip=['example_actions'], seed=3\n"
        ")\n"
    )
    words = ["-q", "-rA", "-p", "no:cacheprovider", "-p", "no:schemathesis", str(tests)]
    done = finished(sys.executable, "-m", "pytest", *words, cwd=folder, timeout_s=250)
    assert done.returncode == 1, done.stdout
    assert "FAILED tests/test_checks.py::test_models_derived" in done.stdout
    assert "change: keep the model_config" in done.stdout
    assert "PASSED tests/test_checks.py::test_episode_ends" in done.stdout
    assert "1 failed" in done.stdout.splitlines()[-1]


def test_the_page_lists_every_check_with_its_sentence() -> None:
    text = PAGE.read_text()
    missing = [one.name for one in checks() if f"| `{one.name}` | {one.description} |" not in text]
    assert not missing
    documented = {
        line.split("`")[1] for line in text.splitlines() if line.startswith("| `") and line.count("|") == 3
    }
    assert sorted(documented) == sorted(one.name for one in checks())  # each has a name of its own


def test_finished_checks_are_reported_after_an_interruption(
    folder: Path, capsys: Any, monkeypatch: Any
) -> None:
    from openenv_core.checker import runner as isolation
    from openenv_core.checker.results import Status, result_of

    def interrupted(target: Any, limits: Any, wanted: Any, *, on_result: Any, **_: Any) -> None:
        on_result(result_of(wanted[0], Status.PASSED, "", "", 0.1))
        raise KeyboardInterrupt

    monkeypatch.setattr(isolation, "run_isolated", interrupted)
    assert main(["validate", str(folder), "--level", "static", "--json"]) == 130
    report = json.loads(capsys.readouterr().out)
    assert (report["ok"], report["interrupted"], report["summary"]["passed"]) == (False, True, 1)


NEVER_ENDS = """\
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("begun", flush=True)
time.sleep(3600)
"""


def test_a_worker_without_its_command_removes_temporary_files_even_if_cleaning_up_hangs(
    tmp_path: Path,
) -> None:
    temporary = tmp_path / "temporary"
    (temporary / "of a check").mkdir(parents=True)
    words = guard_command([sys.executable, "-c", NEVER_ENDS], grace_s=0.1, folder=str(temporary))
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as guard:
        assert guard.stdin is not None
        assert guard.stdout is not None
        assert guard.stdout.readline()
        guard.stdin.close()
        assert guard.wait(60) == 128 + signal.SIGKILL
    assert not temporary.exists()
