"""The trainer's image for CPUs: its recipe by itself, built by a real engine, and a run on three of its containers.

Its gigabytes of packages come once an engine: the image stays, and a change of the code is a change of its last layer.
A build that needs them again begins only where they can be had, so that without a package index this is over in two
minutes.
"""

import hashlib
import json
import os
import re
import subprocess
import tomllib
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from docker_engine import BASE, CONTENT, content_of, engine
from missing import missing
from module_run import finished
from pip_folders import served_to_containers, settings_of_pip

from openenv_core.providers.docker import DockerEngine

__all__ = ["engine"]

ROOT = Path(__file__).parents[2]
IMAGE = "ropewalk-test-rl:cpu"
RECIPE = ("dockerfiles/rl/Dockerfile", "pyproject.toml", "scripts/bootstrap.py", "constraints")
"""What the layers with the packages are made from."""
BUILD_S = 3000
LOOK_S = 120
RUN_S = 400
# One small thing from each place that the build takes packages from.
LOOK = """
apt-get -qq -o Acquire::Retries=0 -o Acquire::http::Timeout=20 -o APT::Update::Error-Mode=any update
python -m pip --disable-pip-version-check --retries 1 --timeout 20 download -q --no-deps -d /tmp/look typing-extensions
"""
# As the manifests have it.
LOCKED = (
    *("--user", "10001:10001", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
    *("--read-only", "--tmpfs", "/tmp:size=1g,mode=1777", "--shm-size", "1g", "--memory", "6g"),
)


TEXT = (ROOT / "dockerfiles/rl/Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
SENT = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
"""What the engine gets of the repository; the rest is ignored."""


def words_after(before: str) -> list[str]:
    (words,) = re.findall(rf"{re.escape(before)} ([\w ]+?)(?:;|$)", TEXT, re.MULTILINE)
    return str(words).split()


def test_copied_files_are_sent_to_the_engine_and_no_secrets() -> None:
    copied = [word for line in re.findall(r"^COPY (.+)$", TEXT, re.MULTILINE) for word in line.split()[:-1]]
    assert len(copied) > 5
    for word in copied:
        assert (ROOT / word).exists(), word
        assert word == "." or Path(word).parts[0] in SENT, word
    assert all((ROOT / name).exists() for name in SENT)
    # And nothing else is: no secrets, no history, no tests.
    assert "*" in (ROOT / ".dockerignore").read_text().splitlines()
    assert {Path(name).parts[0] for name in SENT}.isdisjoint({".git", ".venvs", "runs", "tests", ".env"})


def test_placeholder_packages_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    found = project["tool"]["setuptools"]["packages"]["find"]["include"]
    assert sorted(words_after("for package in")) == sorted(pattern.removesuffix("*") for pattern in found)


def test_all_code_is_compiled_since_nobody_can_later() -> None:
    code = {name for name in SENT if (ROOT / name).is_dir() and any((ROOT / name).rglob("*.py"))}
    assert set(words_after("-m compileall -q")) == code - {"scripts", "dockerfiles"}


# ---- with an engine


def docker(*words: str, timeout_s: float = 120, check: bool = True) -> str:
    done = finished("docker", *words, env={**os.environ, "DOCKER_BUILDKIT": "0"}, timeout_s=timeout_s)
    assert done.returncode == 0 or not check, (done.stdout + done.stderr)[-4000:]
    return (done.stdout + done.stderr).strip()


@pytest.fixture(scope="module")
def image(engine: DockerEngine) -> str:
    """Built, from the cache where that has its layers; it stays, since that takes minutes otherwise."""
    gateway = engine.call("GET", "/networks/bridge")["IPAM"]["Config"][0]["Gateway"]
    with served_to_containers(gateway, settings_of_pip()) as build_arguments:
        _build(engine, build_arguments)
    return IMAGE


def _build(engine: DockerEngine, build_arguments: Mapping[str, str]) -> None:
    content = _content(build_arguments, base=engine.call("GET", f"/images/{BASE}/json")["Id"])
    if content_of(engine, IMAGE) != content:
        _look_for_packages(build_arguments)
    arguments = [f"--build-arg={name}={value}" for name, value in build_arguments.items()]
    file = str(ROOT / "dockerfiles/rl/Dockerfile")
    label = f"--label={CONTENT}={content}"
    docker("build", "--tag", IMAGE, "--file", file, label, *arguments, str(ROOT), timeout_s=BUILD_S)


def _content(build_arguments: Mapping[str, str], *, base: str) -> str:
    """What decides whether the packages are installed anew."""
    digest = hashlib.sha256(json.dumps([base, build_arguments], sort_keys=True).encode())
    for name in RECIPE:
        place = ROOT / name
        for path in sorted(place.rglob("*")) if place.is_dir() else [place]:
            if path.is_file():
                digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _look_for_packages(build_arguments: Mapping[str, str]) -> None:
    """End the test where containers reach no packages: the build would try for long, and fail."""
    name = f"ropewalk-test-look-{uuid.uuid4().hex[:8]}"
    variables = [f"--env={key}={value}" for key, value in build_arguments.items()]
    try:
        docker("run", "--rm", "--name", name, *variables, BASE, "sh", "-euc", LOOK, timeout_s=LOOK_S)
    except (AssertionError, subprocess.TimeoutExpired) as error:
        missing(
            "needs Debian's packages and Python's in containers, some four gigabytes, for an image that this engine "
            f"does not have yet; they are looked for where pip does here, see `pip config list`: {str(error)[-600:]}"
        )
    finally:
        docker("rm", "--force", name, check=False)


@pytest.fixture
def mesh(image: str) -> Iterator[tuple[str, list[str]]]:
    """A network of its own with two workers and an environment on it: its name, and the workers' addresses."""
    name = f"ropewalk-test-{uuid.uuid4().hex[:8]}"
    docker("network", "create", "--internal", name)
    docker("volume", "create", name)
    workers, environment = [f"{name}-{number}" for number in range(2)], f"{name}-environment"
    try:
        docker("run", "--rm", "--volume", f"{name}:/runs", "--user", "0", image, "chown", "10001", "/runs")
        work = 'exec python -m rl_bridge.services.worker "tcp://$(hostname -i):26600"'
        play = "exec ropewalk serve envs.blackjack_env.server.app:app --host 0.0.0.0 --insecure"
        for container, command in (*((worker, work) for worker in workers), (environment, play)):
            options = [*LOCKED, "--init", "--network", name, "--volume", f"{name}:/runs", "--name", container]
            docker("run", "--detach", *options, image, "sh", "-c", command)
        yield name, [_address(worker) for worker in workers]
    finally:
        docker("rm", "--force", *workers, environment, check=False)
        docker("volume", "rm", "--force", name, check=False)
        docker("network", "rm", name, check=False)


@pytest.mark.docker
@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_image_has_the_code_and_its_imports_and_nothing_else(image: str) -> None:
    output = docker("run", "--rm", *LOCKED, "--network", "none", image, "id", "-u")
    assert output == "10001"
    shown = json.loads(docker("image", "inspect", image))[0]
    assert shown["Config"]["User"] == "10001:10001"
    # The code, and not what lies beside it in the repository.
    inside = docker("run", "--rm", "--network", "none", image, "ls", "-A").split()
    assert {"examples", "rl_bridge", "venv"} < set(inside)
    assert {".git", "docs", "runs", "tests"}.isdisjoint(inside)
    imports = "import kubernetes, monarch.actor, monarch.job.kubernetes, torchtitan, vllm"
    docker("run", "--rm", *LOCKED, "--network", "none", image, "python", "-c", imports, timeout_s=RUN_S)


@pytest.mark.docker
@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_run_on_its_containers(image: str, mesh: tuple[str, list[str]]) -> None:
    name, addresses = mesh
    train = (
        "exec ropewalk train --config examples/grpo_blackjack/config.yaml --name run output_dir=/runs "
        f"env.app=null env.url=http://{name}-environment:8000 "
        f"'monarch.workers=[{','.join(f'tcp://{address}:26600' for address in addresses)}]' "
        'monarch.num_nodes=2 monarch.master_addr="$(hostname -i)" trainer.iterations=2 rollout.batch_size=64 '
        "env.sessions=16 evaluation.episodes=64 trainer.checkpoint_interval=1"
    )
    options = [*LOCKED, "--init", "--network", name, "--volume", f"{name}:/runs"]
    docker("run", "--rm", *options, image, "sh", "-c", train, timeout_s=RUN_S)
    look = ["run", "--rm", "--volume", f"{name}:/runs", "--network", "none", image, "cat"]
    rows = [json.loads(line) for line in docker(*look, "/runs/run/metrics.jsonl").splitlines()]
    assert [row["iteration"] for row in rows] == [1, 2]
    assert all(row["mismatch/logprob_max"] <= 1e-4 for row in rows)
    assert json.loads(docker(*look, "/runs/run/report.json"))["hands"] == 64


def _address(container: str) -> str:
    shown = json.loads(docker("inspect", container))[0]["NetworkSettings"]["Networks"]
    (network,) = shown.values()
    return str(network["IPAddress"])
