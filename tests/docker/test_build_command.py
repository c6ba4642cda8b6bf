"""`ropewalk build` with a real engine: what it builds, what it leaves, how it fails and how it is stopped."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import docker
import pytest

from openenv_core.errors import ConfigurationError
from openenv_core.images import commandline
from openenv_core.providers.docker import Engine

pytestmark = [pytest.mark.docker, pytest.mark.soak]

COMMAND = (sys.executable, "-m", "openenv_core.cli", "build")
# No base of ours: these tests are about building.
PLAIN = "FROM python:3.11-slim\n"


@pytest.fixture
def api(engine: Engine) -> Iterator[docker.APIClient]:
    client = docker.APIClient(base_url=engine.address.url)
    yield client
    client.close()


@pytest.fixture
def mark() -> str:
    return uuid.uuid4().hex[:12]


Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path, mark: str, api: docker.APIClient) -> Iterator[Make]:
    """Make folders of environments, and take their images away in the end."""

    def made(dockerfile: str, *, name: str = "one", **files: str) -> Path:
        folder = tmp_path / f"t{mark}_{name}_env"
        (folder / "server").mkdir(parents=True, exist_ok=True)
        (folder / "server" / "Dockerfile").write_text(dockerfile)
        (folder / "openenv.yaml").write_text(f"spec_version: 1\nname: {folder.name}\n")
        for path, text in files.items():
            (folder / path.replace("__", "/").replace("_dot_", ".")).write_text(text)
        return folder

    yield made
    labels = {f"ropewalk.environment={folder.name}" for folder in tmp_path.glob(f"t{mark}_*")}
    for label in labels:
        for image in api.images(filters={"label": label}):
            api.remove_image(image["Id"], force=True)


def build(*words: object, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, words)],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def tag_of(folder: Path, tag: str = "latest") -> str:
    return f"{folder.name.removesuffix('_env').replace('_', '-')}-env:{tag}"


def containers(api: docker.APIClient, mark: str) -> list[Any]:
    return [one for one in api.containers(all=True) if mark in one["Command"]]


def run(image: str, *words: str) -> str:
    done = subprocess.run(
        ["docker", "run", "--rm", "--network", "none", image, *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout


def test_an_image_has_its_name_its_tags_and_its_arguments(make: Make, api: docker.APIClient) -> None:
    folder = make(f"ARG COLOUR=red\n{PLAIN}ARG COLOUR\nENV COLOUR=$COLOUR\n")
    done = build(folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == tag_of(folder)
    assert "[1/" in done.stderr
    assert run(tag_of(folder), "printenv", "COLOUR") == "red\n"

    done = build(
        folder,
        "--build-arg",
        "COLOUR=blue",
        "-t",
        "{name}:1",
        "-t",
        f"registry.example.org/x/{folder.name}:2",
    )
    assert done.returncode == 0, done.stderr
    image = api.inspect_image(tag_of(folder, "1"))
    assert api.inspect_image(f"registry.example.org/x/{folder.name}:2")["Id"] == image["Id"]
    assert "COLOUR=blue" in image["Config"]["Env"]
    assert image["Config"]["Labels"]["ropewalk.environment"] == folder.name
    assert containers(api, folder.name) == []


def built(folder: Path, api: docker.APIClient, *words: object) -> str:
    """Build a folder, and return the image's identity."""
    done = build(folder, *words)
    assert done.returncode == 0, done.stderr
    return str(api.inspect_image(tag_of(folder))["Id"])


@pytest.mark.parametrize("mount", ["", "--mount=type=cache,target=/c "])
def test_an_image_goes_when_another_takes_its_name(make: Make, api: docker.APIClient, mount: str) -> None:
    def anew() -> str:
        return built(make(f"{PLAIN}RUN {mount}echo {uuid.uuid4().hex} > /kept\n"), api)

    first = anew()
    second = anew()
    with pytest.raises(docker.errors.ImageNotFound):
        api.inspect_image(first)
    # A second name, and a container, are reasons to stay.
    folder = make("")
    api.tag(second, folder.name, "kept")
    third = anew()
    assert api.inspect_image(second)["RepoTags"] == [f"{folder.name}:kept"]
    container = api.create_container(third)
    try:
        anew()
        assert api.inspect_image(third)["Id"] == third
    finally:
        api.remove_container(container)
    # What another command made is not ours to remove, even where its name is taken.
    other = subprocess.run(
        ["docker", "build", "-q", "-t", tag_of(folder), "-"],
        input=f"{PLAIN}LABEL t={folder.name}\n",
        env={**os.environ, "DOCKER_BUILDKIT": "0"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout.strip()
    anew()
    assert api.inspect_image(other)["Id"] == other
    api.remove_image(other)


def test_an_image_goes_after_the_last_that_stands_on_it(make: Make, api: docker.APIClient) -> None:
    below = make(f"{PLAIN}RUN echo 1\n", name="below")
    first = built(below, api)
    above = make(f"FROM {tag_of(below)}\nRUN echo 1\n", name="above")
    built(above, api)
    make(f"{PLAIN}RUN echo 2\n", name="below")
    built(below, api)
    assert api.inspect_image(first)["RepoTags"] == []
    built(above, api)
    with pytest.raises(docker.errors.ImageNotFound):
        api.inspect_image(first)
    api.remove_image(tag_of(above))


def test_the_same_folder_twice_is_built_once(make: Make) -> None:
    folder = make(f"{PLAIN}RUN true\n")
    done = build(folder, f"{folder}/")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(tag_of(folder)) == 1


def test_the_base_is_an_argument(make: Make, api: docker.APIClient) -> None:
    folder = make("ARG BASE_IMAGE=registry.example.org/absent:1\nFROM ${BASE_IMAGE}\nRUN true\n")
    done = build(folder, "--base", "python:3.11-slim")
    assert done.returncode == 0, done.stderr
    assert api.inspect_image(tag_of(folder))["Config"]["Labels"]["ropewalk.environment"] == folder.name


def test_dockerignore_is_heeded(make: Make) -> None:
    files = {
        "_dot_dockerignore": "*.txt\n!kept.txt\nserver\n",
        "a_dot_txt": "x",
        "kept_dot_txt": "x",
        "b_dot_py": "x",
    }
    folder = make(f"{PLAIN}COPY . /here\n", **files)
    for mount in ("", "RUN --mount=type=cache,target=/c true\n"):
        (folder / "server" / "Dockerfile").write_text(f"{PLAIN}COPY . /here\n{mount}")
        done = build(folder)
        assert done.returncode == 0, done.stderr
        listed = run(tag_of(folder), "find", "/here", "-type", "f", "-printf", "%P ").split()
        assert sorted(set(listed) - {".dockerignore"}) == ["b.py", "kept.txt", "openenv.yaml"]


def test_a_failing_step_shows_what_it_said_and_the_rest_goes_on(
    make: Make, api: docker.APIClient, mark: str
) -> None:
    wrong = make(f"{PLAIN}RUN echo {mark} said this && exit 7\n", name="wrong")
    right = make(f"{PLAIN}RUN true\n", name="right")
    done = build(wrong, right)
    assert done.returncode == 1
    assert f"{mark} said this" in done.stderr
    assert "returned a non-zero code: 7" in done.stderr
    assert "correct that step of the Dockerfile" in done.stderr
    assert f"1 of 2 failed: {wrong}" in done.stderr
    assert done.stdout.split()[0] == tag_of(right)
    assert containers(api, mark) == []


def test_buildkit_builds_what_needs_it_and_its_failures_say_as_much(
    make: Make, mark: str, api: docker.APIClient
) -> None:
    folder = make(f"{PLAIN}RUN --mount=type=cache,target=/c echo {mark} >/c/x && cp /c/x /kept\n")
    done = build(folder, "-t", "{name}:1", "-t", "{name}:2")
    assert done.returncode == 0, done.stderr
    assert "with BuildKit, for RUN --mount (line 2)" in done.stderr
    assert run(tag_of(folder, "2"), "cat", "/kept") == f"{mark}\n"
    assert api.inspect_image(tag_of(folder, "1"))["Config"]["Labels"]["ropewalk.environment"] == folder.name
    make(f"{PLAIN}RUN --mount=type=cache,target=/c echo {mark} said this && exit 7\n")
    done = build(folder)
    assert done.returncode == 1
    assert f"--- the step's last output ---\n{mark} said this\n---" in done.stderr
    assert "exit code: 7" in done.stderr


def test_a_file_that_is_copied_and_not_there_is_named(make: Make) -> None:
    folder = make(f"{PLAIN}COPY absent /\n")
    done = build(folder)
    assert done.returncode == 1
    assert "absent" in done.stderr
    assert ".dockerignore leaves it out" in done.stderr


def test_a_base_that_cannot_be_had_is_named(make: Make) -> None:
    folder = make("ARG BASE_IMAGE\nFROM ${BASE_IMAGE}\n")
    done = build(folder, "--base", "127.0.0.1:1/nothing:1")
    assert done.returncode == 1
    assert "ropewalk build base" in done.stderr


@pytest.mark.parametrize("mount", ["", "--mount=type=cache,target=/c "])
def test_ctrl_c_ends_the_build_and_leaves_nothing(
    make: Make, api: docker.APIClient, mark: str, mount: str
) -> None:
    # The step says by a number in the list of processes that it runs.
    seconds = str(100_000 + int(mark, 16) % 800_000)
    folder = make(f"{PLAIN}RUN {mount}sleep {seconds}\n")
    process = subprocess.Popen(
        [*COMMAND, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        until(lambda: running(seconds), "the step to run")
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Traceback" not in said
    until(lambda: not running(seconds), "the step to end")
    until(lambda: not containers(api, seconds), "its container to go")
    with pytest.raises(docker.errors.ImageNotFound):
        api.inspect_image(tag_of(folder))


def running(seconds: str) -> bool:
    return (
        subprocess.run(["pgrep", "-f", f"^sleep {seconds}"], capture_output=True, timeout=20).returncode == 0
    )


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < end, f"waited for {what}"
        time.sleep(0.1)


def test_without_a_command_that_has_buildkit_it_says_what_to_install(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    fake = tmp_path / "bin" / "docker"
    fake.write_text("#!/bin/sh\n[ \"$1\" = --version ] && echo 'Docker version 28.2.2' && exit 0\nexit 1\n")
    fake.chmod(0o755)
    folder = make(f"{PLAIN}RUN --mount=type=cache,target=/c true\n")
    done = build(folder, PATH=str(tmp_path / "bin"))
    assert done.returncode == 1
    assert "without the component buildx; install buildx" in done.stderr
    monkeypatch.setenv("PATH", "/nowhere")
    commandline.find_command.cache_clear()
    with pytest.raises(ConfigurationError, match="got none"):
        commandline.find_command()
