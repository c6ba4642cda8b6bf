"""The base image, and BlackJack's on it, with a real engine."""

import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

from openenv_core.cli.main import main
from openenv_core.client import GenericEnvClient
from openenv_core.images import base, installed
from openenv_core.images.events import Event, Note, Step
from openenv_core.images.space import stage
from openenv_core.providers.docker import Engine, LocalDockerProvider

ROOT = Path(__file__).parents[2]
PYTHON = "python:3.11-slim"
REPOSITORY = "ropewalk-test-base"
MEGABYTE = 1_000_000

pytestmark = [pytest.mark.docker, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def api(engine: Engine) -> Iterator[docker.APIClient]:
    client = docker.APIClient(base_url=engine.address.url)
    yield client
    client.close()


@pytest.fixture(scope="module")
def still(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pytest.MonkeyPatch]:
    """Bases under a name of these tests, made from a source that nobody edits meanwhile."""
    kept = tmp_path_factory.mktemp("kept")
    placed = installed.place(kept)

    def place(folder: Path) -> installed.Placed:
        shutil.copytree(kept, folder, dirs_exist_ok=True)
        return placed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "REPOSITORY", REPOSITORY)
        patch.setattr(installed, "place", place)
        yield patch


@pytest.fixture(scope="module")
def runtime(api: docker.APIClient, still: pytest.MonkeyPatch) -> Iterator[str]:
    yield base.ensure(api, base.Variant.RUNTIME, lambda _: None)
    for image in api.images(name=REPOSITORY):
        for tag in image["RepoTags"]:
            api.remove_image(tag, force=True)


def in_container(image: str, *words: str, options: tuple[str, ...] = ()) -> str:
    command = ["docker", "run", "--rm", "--network", "none", *options, image, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def files(image: str) -> set[str]:
    command = ("find", "/", "-xdev", "-type", "f")
    return set(in_container(image, *command, options=("--user", "0")).splitlines())


@pytest.mark.soak
def test_a_base_is_made_once_and_again_when_its_parts_change(
    api: docker.APIClient, runtime: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Event] = []
    assert base.ensure(api, base.Variant.RUNTIME, told.append) == runtime
    assert told == []
    place = installed.place

    def with_more(folder: Path) -> installed.Placed:
        placed = place(folder)
        (folder / "more").write_text("x")
        return placed

    before = api.inspect_image(runtime)["Id"]
    monkeypatch.setattr(installed, "place", with_more)
    base.ensure(api, base.Variant.RUNTIME, told.append)
    assert isinstance(told[0], Note)
    assert any(isinstance(event, Step) for event in told)
    after = api.inspect_image(runtime)
    assert after["Id"] != before
    assert api.inspect_image(f"{REPOSITORY}:latest")["Id"] == after["Id"]


@pytest.mark.soak
def test_it_is_small_and_holds_nothing_that_only_building_needs(api: docker.APIClient, runtime: str) -> None:
    above = api.inspect_image(runtime)["Size"] - api.inspect_image(PYTHON)["Size"]
    assert above < 40 * MEGABYTE
    # What the image below brings is not ours to say, so what we add is looked at.
    added = files(runtime) - files(PYTHON)
    assert "/opt/ropewalk/bin/ropewalk" in added
    tops = ("/opt/ropewalk/", "/etc/", "/.dockerenv")  # a user's line, and what every container has
    assert [path for path in added if not path.startswith(tops)] == []
    assert not [path for path in added if "/pip/" in path or "/setuptools/" in path]
    assert in_container(runtime, "sh", "-c", "command -v gcc cc make || true") == ""


@pytest.mark.soak
def test_its_user_is_nobody_s_and_may_write_to_tmp_alone(runtime: str) -> None:
    assert in_container(runtime, "id", "-u") == "10001"
    script = (
        "touch /tmp/a; for place in / /app /opt/ropewalk /etc; do touch $place/x 2>&- && echo $place; done; :"
    )
    assert in_container(runtime, "sh", "-c", script) == ""
    hardened = ("--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--security-opt", "no-new-privileges")
    assert in_container(runtime, "sh", "-c", "touch ~/a && pwd", options=hardened) == "/app"


@pytest.mark.soak
def test_what_is_installed_is_compiled(runtime: str) -> None:
    # A read-only container would compile all of it at every start.
    said = in_container(
        runtime,
        "python",
        "-c",
        "import sys, servers.app, uvicorn, pathlib\n"
        "files = [m.__cached__ for m in sys.modules.values() if '/opt/ropewalk' in (getattr(m, '__file__', 0) or '')"
        " and m.__file__.endswith('.py')]\n"
        "print(len(files) > 100, [f for f in files if not pathlib.Path(f).is_file()])",
    )
    assert said == "True []"


@pytest.mark.soak
def test_pip_installs_beside_ropewalk(api: docker.APIClient, runtime: str, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "pyproject.toml").write_text(
        '[project]\nname = "mine"\nversion = "1"\ndependencies = ["ropewalk[server]"]\n'
    )
    (tmp_path / "mine" / "mine.py").write_text("import servers\n")
    (tmp_path / "Dockerfile").write_text(
        f"FROM {runtime}\nUSER root\nCOPY mine /mine\nRUN pip install /mine\nUSER env\n"
    )
    tag = f"{REPOSITORY}-pip:1"
    said = list(api.build(path=str(tmp_path), tag=tag, rm=True, decode=True))
    try:
        assert in_container(tag, "python", "-c", "import mine; print(mine.__file__)").startswith(
            "/opt/ropewalk/"
        )
    finally:
        api.remove_image(tag, force=True)
    assert "Collecting fastapi" not in str(said)  # it is there


@pytest.mark.soak
def test_the_variant_for_released_folders_can_build(
    api: docker.APIClient, runtime: str, still: pytest.MonkeyPatch
) -> None:
    image = base.ensure(api, base.Variant.BUILD, lambda _: None)
    assert image.endswith("-build")
    assert in_container(image, "id", "-u") == "0"
    assert in_container(image, "sh", "-c", "uv --version && git --version && curl --version").count("\n") > 1
    assert "1" in in_container(image, "printenv", "UV_SYSTEM_CERTS", "UV_NATIVE_TLS")
    assert in_container(image, "sh", "-c", "echo ~") == "/root"


@pytest.fixture(scope="module")
def blackjack(engine: Engine) -> Iterator[str]:
    tag = "ropewalk-test-blackjack:latest"
    assert main(["build", str(ROOT / "envs" / "blackjack_env"), "--tag", tag]) == 0
    yield tag
    subprocess.run(["docker", "image", "rm", "--force", tag], capture_output=True, timeout=60, check=True)


def test_blackjack_s_container_plays_a_hand_with_everything_taken_away(blackjack: str) -> None:
    with (
        LocalDockerProvider(blackjack, network="none", memory="256m", pids=64) as provider,
        GenericEnvClient(provider.start()).sync() as client,
    ):
        result = client.reset(seed=7)
        while not result.done:
            result = client.step({"action": "stand"})
        assert result.reward in (-1, 0, 1)


@pytest.mark.soak
def test_the_engine_sees_that_blackjack_is_healthy(blackjack: str) -> None:
    options = ["--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--health-interval", "1s"]
    started = subprocess.run(
        ["docker", "run", "--detach", *options, blackjack],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    container = started.stdout.strip()
    try:
        end = time.monotonic() + 60
        while (status := health(container)) == "starting" and time.monotonic() < end:
            time.sleep(0.2)
        assert status == "healthy"
        wrong = subprocess.run(
            ["docker", "exec", "--env", "PORT=9", container, "healthcheck"],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert wrong.returncode == 1
        assert "expected a healthy server on port 9" in wrong.stdout
    finally:
        subprocess.run(["docker", "rm", "--force", container], capture_output=True, timeout=60, check=True)


def health(container: str) -> str:
    said = subprocess.run(
        ["docker", "inspect", container], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    return str(json.loads(said)[0]["State"]["Health"]["Status"])


@pytest.mark.soak
def test_a_staged_space_of_blackjack_builds_and_serves_by_itself(engine: Engine, tmp_path: Path) -> None:
    stage(ROOT / "envs" / "blackjack_env", tmp_path)
    tag = "ropewalk-test-space:latest"
    try:
        assert main(["build", str(tmp_path), "--tag", tag]) == 0
        # The hub runs containers as a user of its own, and its callers name the Space.
        with LocalDockerProvider(tag, user="1000") as provider:
            asked = urllib.request.Request(f"{provider.start()}/health", headers={"Host": "me-dice.hf.space"})
            with urllib.request.urlopen(asked, timeout=30) as answer:
                assert json.load(answer) == {"status": "healthy"}
    finally:
        subprocess.run(["docker", "image", "rm", "--force", tag], capture_output=True, timeout=60, check=True)
