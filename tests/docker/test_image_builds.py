"""Images built and pushed for real: the base, `ropewalk build`, `ropewalk push`."""

import base64
import json
import os
import shutil
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
from module_run import finished
from registry_server import PASSWORD, USER, Registry, running_registry

from openenv_core.images import base

PYTHON = "python:3.11-slim"
REPOSITORY = "ropewalk-test-base"
MEGABYTE = 1_000_000
COMMAND = (sys.executable, "-m", "openenv_core.cli")
# No base of ours: those tests are about building.
PLAIN = f"FROM {PYTHON}\n"

HAS_BUILDKIT = (
    shutil.which("docker") is not None
    and subprocess.run(["docker", "buildx", "version"], capture_output=True, timeout=60).returncode == 0
)

pytestmark = [pytest.mark.docker, pytest.mark.soak, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def still(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pytest.MonkeyPatch]:
    """Base images under a name of these tests, built from an unchanging copy of the source."""
    kept = tmp_path_factory.mktemp("kept")
    placed = base.copy_package(kept)

    def place(folder: Path) -> str:
        shutil.copytree(kept, folder, dirs_exist_ok=True)
        return placed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "OUR_BASE", REPOSITORY)
        patch.setattr(base, "copy_package", place)
        yield patch


@pytest.fixture(scope="module")
def runtime(api: docker.APIClient, still: pytest.MonkeyPatch) -> Iterator[str]:
    yield base.ensure(base.Variant.RUNTIME)
    for image in api.images(name=REPOSITORY):
        for tag in image["RepoTags"]:
            api.remove_image(tag, force=True)


def in_container(image: str, *words: str, options: tuple[str, ...] = ()) -> str:
    done = finished("docker", "run", "--rm", "--network", "none", *options, image, *words, timeout_s=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def files(image: str) -> set[str]:
    command = ("find", "/", "-xdev", "-type", "f")
    return set(in_container(image, *command, options=("--user", "0")).splitlines())


def test_base_is_built_once_and_again_when_its_parts_change(
    api: docker.APIClient, runtime: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert base.ensure(base.Variant.RUNTIME) == runtime
    assert capsys.readouterr().err == ""
    place = base.copy_package

    def with_more(folder: Path) -> str:
        placed = place(folder)
        (folder / "more").write_text("x")
        return placed

    before = api.inspect_image(runtime)["Id"]
    monkeypatch.setattr(base, "copy_package", with_more)
    base.ensure(base.Variant.RUNTIME)
    assert "making the base image" in capsys.readouterr().err
    after = api.inspect_image(runtime)
    assert after["Id"] != before
    assert api.inspect_image(f"{REPOSITORY}:latest")["Id"] == after["Id"]


def test_the_base_is_small_compiled_and_its_user_may_write_to_tmp_alone(
    api: docker.APIClient, runtime: str
) -> None:
    above = api.inspect_image(runtime)["Size"] - api.inspect_image(PYTHON)["Size"]
    assert above < 40 * MEGABYTE
    # What the image below brings is not ours to say, so what we add is looked at.
    added = files(runtime) - files(PYTHON)
    assert "/opt/ropewalk/bin/ropewalk" in added
    tops = ("/opt/ropewalk/", "/etc/", "/.dockerenv")  # a user's line, and what every container has
    assert [path for path in added if not path.startswith(tops)] == []
    assert not [path for path in added if "/pip/" in path or "/setuptools/" in path]
    assert in_container(runtime, "sh", "-c", "command -v gcc cc make || true") == ""
    # A read-only container would compile all of it at every start.
    code = (
        "import sys, servers.app, uvicorn, pathlib\n"
        "files = [m.__cached__ for m in sys.modules.values() if '/opt/ropewalk' in (getattr(m, '__file__', 0) or '')"
        " and m.__file__.endswith('.py')]\n"
        "print(len(files) > 100, [f for f in files if not pathlib.Path(f).is_file()])"
    )
    assert in_container(runtime, "python", "-c", code) == "True []"
    assert in_container(runtime, "id", "-u") == "10001"
    script = (
        "touch /tmp/a; for place in / /app /opt/ropewalk /etc; do touch $place/x 2>&- && echo $place; done; :"
    )
    assert in_container(runtime, "sh", "-c", script) == ""
    hardened = ("--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--security-opt", "no-new-privileges")
    assert in_container(runtime, "sh", "-c", "touch ~/a && pwd", options=hardened) == "/app"


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
    log = list(api.build(path=str(tmp_path), tag=tag, rm=True, decode=True))
    try:
        assert in_container(tag, "python", "-c", "import mine; print(mine.__file__)").startswith(
            "/opt/ropewalk/"
        )
    finally:
        api.remove_image(tag, force=True)
    assert "Collecting fastapi" not in str(log)  # it is there


def test_the_variant_for_released_folders_can_build(
    api: docker.APIClient, runtime: str, still: pytest.MonkeyPatch
) -> None:
    image = base.ensure(base.Variant.BUILD)
    assert image.endswith("-build")
    assert in_container(image, "id", "-u") == "0"
    assert in_container(image, "sh", "-c", "uv --version && git --version && curl --version").count("\n") > 1
    assert "1" in in_container(image, "printenv", "UV_SYSTEM_CERTS", "UV_NATIVE_TLS")
    assert in_container(image, "sh", "-c", "echo ~") == "/root"


# ---- ropewalk build


@pytest.fixture
def mark() -> str:
    return uuid.uuid4().hex[:12]


Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path, mark: str, api: docker.APIClient) -> Iterator[Make]:
    """Make folders of environments; remove their images in the end."""

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


def build(*arguments: object) -> subprocess.CompletedProcess[str]:
    return finished(*COMMAND, "build", *map(str, arguments), timeout_s=110)


def tag_of(folder: Path, tag: str = "latest") -> str:
    return f"{folder.name.removesuffix('_env').replace('_', '-')}-env:{tag}"


def containers(api: docker.APIClient, mark: str) -> list[Any]:
    return [one for one in api.containers(all=True) if mark in one["Command"]]


def test_image_gets_its_name_tags_and_arguments(make: Make, api: docker.APIClient) -> None:
    dockerfile = "ARG BASE_IMAGE=registry.example.org/absent:1\nFROM ${BASE_IMAGE}\n"
    folder = make(f"ARG COLOUR=red\n{dockerfile}ARG COLOUR\nENV COLOUR=$COLOUR\n")
    done = build(folder, f"{folder}/", "--build-arg", f"BASE_IMAGE={PYTHON}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(tag_of(folder)) == 1  # the same folder twice is built once
    assert "FROM" in done.stderr
    assert in_container(tag_of(folder), "printenv", "COLOUR") == "red"

    other = f"registry.example.org/x/{folder.name}:2"
    done = build(
        folder,
        "--build-arg",
        f"BASE_IMAGE={PYTHON}",
        "--build-arg",
        "COLOUR=blue",
        "-t",
        "{name}:1",
        "-t",
        other,
    )
    assert done.returncode == 0, done.stderr
    image = api.inspect_image(tag_of(folder, "1"))
    assert api.inspect_image(other)["Id"] == image["Id"]
    assert "COLOUR=blue" in image["Config"]["Env"]
    assert image["Config"]["Labels"]["ropewalk.environment"] == folder.name
    assert containers(api, folder.name) == []


def test_failing_step_shows_its_output_and_the_others_build(
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


@pytest.mark.parametrize("mount", ["", *["--mount=type=cache,target=/c "] * HAS_BUILDKIT])
def test_ctrl_c_ends_the_build_and_leaves_nothing(
    make: Make, api: docker.APIClient, mark: str, mount: str
) -> None:
    # The step says by a number in the list of processes that it runs.
    seconds = str(100_000 + int(mark, 16) % 800_000)
    folder = make(f"{PLAIN}RUN {mount}sleep {seconds}\n")
    process = subprocess.Popen(
        [*COMMAND, "build", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        until(lambda: running(seconds), "the step to run")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Traceback" not in errors
    until(lambda: not running(seconds), "the step to end")
    until(lambda: not containers(api, seconds), "its container to go")
    with pytest.raises(docker.errors.ImageNotFound):
        api.inspect_image(tag_of(folder))


def running(seconds: str) -> bool:
    return (
        subprocess.run(["pgrep", "-f", f"^sleep {seconds}"], capture_output=True, timeout=60).returncode == 0
    )


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < end, f"waited for {what}"
        time.sleep(0.1)


# ---- ropewalk push


@pytest.fixture
def image(api: docker.APIClient, tmp_path: Path) -> Iterator[str]:
    """A small image whose layers are in no registry."""
    folder = tmp_path / "image"
    folder.mkdir()
    mark = uuid.uuid4().hex
    # As little as can run, so that a push takes no time: a program without libraries, which every Linux has.
    program = shutil.which("ldconfig", path="/sbin:/usr/sbin")
    if program is None:
        pytest.skip("needs ldconfig, as Linux has it")
    shutil.copyfile(program, folder / "program")
    (folder / "program").chmod(0o755)
    (folder / "mark").write_text(mark)
    (folder / "Dockerfile").write_text('FROM scratch\nCOPY program mark /\nCMD ["/program", "--version"]\n')
    name = f"ropewalk-test-{mark[:12]}:1"
    list(api.build(path=str(folder), tag=name, rm=True, decode=True))
    yield name
    for one in api.images(filters={"reference": [f"*/*/{name}", f"*/{name}", name]}):
        api.remove_image(one["Id"], force=True)


def push(image: str, *words: str, config: Path | None = None) -> subprocess.CompletedProcess[str]:
    surroundings = {**os.environ, **({"DOCKER_CONFIG": str(config)} if config is not None else {})}
    return finished(*COMMAND, "push", image, *words, env=surroundings, timeout_s=100)


def test_pushed_image_can_be_pulled(api: docker.APIClient, image: str, tmp_path: Path) -> None:
    with running_registry(tmp_path) as registry:
        done = push(image, "--registry", f"{registry.address}/team")
        assert done.returncode == 0, done.stderr
        remote, digest = done.stdout.split()
        assert remote == f"{registry.address}/team/{image}"
        assert digest.startswith("sha256:")
        assert ": Pushed" in done.stderr
        before = api.inspect_image(image)["Id"]
        for name in (image, remote):
            api.remove_image(name)
        with pytest.raises(docker.errors.ImageNotFound):
            api.inspect_image(before)
        api.pull(remote)
        assert api.inspect_image(remote)["Id"] == before
        assert [each.partition("@")[2] for each in api.inspect_image(remote)["RepoDigests"]] == [digest]
        assert "ldconfig" in in_container(remote)


def login(config: Path, registry: Registry, password: str) -> None:
    word = base64.b64encode(f"{USER}:{password}".encode()).decode()
    config.mkdir(exist_ok=True)
    (config / "config.json").write_text(json.dumps({"auths": {registry.address: {"auth": word}}}))


def test_push_uses_the_stored_docker_login(image: str, tmp_path: Path) -> None:
    config = tmp_path / "config"
    with running_registry(tmp_path, password=True) as registry:
        options = ("--registry", f"{registry.address}/team")
        config.mkdir()
        for wrong in (None, "another"):
            if wrong is not None:
                login(config, registry, wrong)
            done = push(image, *options, config=config)
            assert done.returncode == 1
            assert f"`docker login {registry.address}`" in done.stderr
            assert done.stdout == ""
        login(config, registry, PASSWORD)
        done = push(image, *options, config=config)
        assert done.returncode == 0, done.stderr


def test_pushes_that_fail_are_failures_and_others_go_on(
    api: docker.APIClient, image: str, tmp_path: Path
) -> None:
    done = push(image, "--registry", "127.0.0.1:1/team")
    assert (done.returncode, done.stdout) == (1, "")
    assert "connection refused" in done.stderr
    # The name that the push needed is gone again.
    with pytest.raises(docker.errors.ImageNotFound):
        api.inspect_image(f"127.0.0.1:1/team/{image}")
    with running_registry(tmp_path, read_only=True) as registry:
        # Uploads fail in the middle, within an answer of the engine whose status is 200.
        done = push(image, "--registry", f"{registry.address}/team")
        assert (done.returncode, done.stdout) == (1, "")
    (tmp_path / "more").mkdir()
    with running_registry(tmp_path / "more") as registry:
        done = push("ropewalk-test-nothing:1", image, "--registry", registry.address)
        assert done.returncode == 1
        assert "no image ropewalk-test-nothing:1 here; `ropewalk build` makes it" in done.stderr
        assert "1 of 2 did not arrive" in done.stderr
        assert done.stdout.startswith(f"{registry.address}/{image}  sha256:")
