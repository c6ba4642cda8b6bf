"""Images that are built and pushed for real: our base, `ropewalk build`, `ropewalk push`."""

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

import pytest
from registry_server import PASSWORD, USER, running_registry

from openenv_core.images import base
from openenv_core.providers.docker import DockerEngine

PYTHON = "python:3.11-slim"
REPOSITORY = "ropewalk-test-base"
MEGABYTE = 1_000_000
# No base of ours: those tests are about building.
PLAIN = f"FROM {PYTHON}\n"

HAS_BUILDKIT = (
    shutil.which("docker") is not None
    and subprocess.run(["docker", "buildx", "version"], capture_output=True, timeout=20).returncode == 0
)
MOUNTS = ["", *["--mount=type=cache,target=/c "] * HAS_BUILDKIT]

pytestmark = [pytest.mark.docker, pytest.mark.soak, pytest.mark.timeout(600)]


def docker(*words: str, **options: object) -> str:
    done = subprocess.run(
        ["docker", *words],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        **options,  # type: ignore[call-overload]
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout).strip()


def in_container(image: str, *words: str, options: tuple[str, ...] = ()) -> str:
    return docker("run", "--rm", "--network", "none", *options, image, *words)


def remove_images(*filters: str) -> None:
    words = [word for each in filters for word in ("--filter", each)]
    if found := set(docker("images", "--quiet", "--no-trunc", *words).split()):
        docker("image", "rm", "--force", *found)


def identity(engine: DockerEngine, image: str) -> str | None:
    found = engine.find_image(image)
    return None if found is None else str(found["Id"])


# ---- the base


@pytest.fixture(scope="module")
def runtime(engine: DockerEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A base under a name of these tests, made from a source that nobody edits meanwhile."""
    kept = tmp_path_factory.mktemp("kept")
    placed = base.place(kept)

    def place(folder: Path) -> base.Placed:
        shutil.copytree(kept, folder, dirs_exist_ok=True)
        return placed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "OUR_BASE", REPOSITORY)
        patch.setattr(base, "place", place)
        yield base.ensure(engine, base.Variant.RUNTIME)
        remove_images(f"reference={REPOSITORY}")


def test_a_base_is_made_once_and_again_when_its_parts_change(
    engine: DockerEngine, runtime: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert base.ensure(engine, base.Variant.RUNTIME) == runtime
    assert capsys.readouterr().err == ""
    place = base.place

    def with_more(folder: Path) -> base.Placed:
        placed = place(folder)
        (folder / "more").write_text("x")
        return placed

    before = identity(engine, runtime)
    monkeypatch.setattr(base, "place", with_more)
    base.ensure(engine, base.Variant.RUNTIME)
    assert "making the base image" in capsys.readouterr().err
    assert identity(engine, runtime) == identity(engine, f"{REPOSITORY}:latest") != before


def test_the_base_is_small_compiled_and_its_user_may_write_to_tmp_alone(
    engine: DockerEngine, runtime: str
) -> None:
    ours, below = engine.find_image(runtime), engine.find_image(PYTHON)
    assert ours is not None
    assert below is not None
    assert ours["Size"] - below["Size"] < 40 * MEGABYTE
    # What the image below brings is not ours to say, so what we add is looked at.
    find = ("find", "/", "-xdev", "-type", "f")
    as_root = ("--user", "0")
    lines = (in_container(image, *find, options=as_root).splitlines() for image in (runtime, PYTHON))
    added = set.difference(*map(set, lines))
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


def test_pip_installs_beside_ropewalk(runtime: str, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "pyproject.toml").write_text(
        '[project]\nname = "mine"\nversion = "1"\ndependencies = ["ropewalk[server]"]\n'
    )
    (tmp_path / "mine" / "mine.py").write_text("import servers\n")
    (tmp_path / "Dockerfile").write_text(
        f"FROM {runtime}\nUSER root\nCOPY mine /mine\nRUN pip install /mine\nUSER env\n"
    )
    tag = f"{REPOSITORY}-pip:1"
    said = docker("build", "--tag", tag, str(tmp_path))
    try:
        made = in_container(tag, "python", "-c", "import mine; print(mine.__file__)")
    finally:
        docker("image", "rm", "--force", tag)
    assert made.startswith("/opt/ropewalk/")
    assert "Collecting fastapi" not in said  # it is there


@pytest.mark.usefixtures("runtime")
def test_the_variant_for_released_folders_can_build(engine: DockerEngine) -> None:
    image = base.ensure(engine, base.Variant.BUILD)
    assert image.endswith("-build")
    assert in_container(image, "id", "-u") == "0"
    assert in_container(image, "sh", "-c", "uv --version && git --version && curl --version").count("\n") > 1
    assert "1" in in_container(image, "printenv", "UV_SYSTEM_CERTS", "UV_NATIVE_TLS")
    assert in_container(image, "sh", "-c", "echo ~") == "/root"


# ---- ropewalk build

Make = Callable[..., Path]


@pytest.fixture
def mark() -> str:
    return uuid.uuid4().hex[:12]


@pytest.fixture
def make(tmp_path: Path, mark: str) -> Iterator[Make]:
    """Make folders of environments, and take their images away in the end."""

    def made(dockerfile: str, name: str = "one") -> Path:
        folder = tmp_path / f"t{mark}_{name}_env"
        (folder / "server").mkdir(parents=True, exist_ok=True)
        (folder / "server" / "Dockerfile").write_text(dockerfile)
        (folder / "openenv.yaml").write_text(f"spec_version: 1\nname: {folder.name}\n")
        return folder

    yield made
    for folder in tmp_path.glob(f"t{mark}_*"):
        remove_images(f"label=ropewalk.environment={folder.name}")


def ropewalk(*words: object, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "openenv_core.cli", *map(str, words)],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def tag_of(folder: Path, tag: str = "latest") -> str:
    return f"{folder.name.removesuffix('_env').replace('_', '-')}-env:{tag}"


def containers(mark: str) -> list[str]:
    return [line for line in docker("ps", "-a", "--no-trunc").splitlines() if mark in line]


def test_an_image_has_its_name_its_tags_and_its_arguments(make: Make, engine: DockerEngine) -> None:
    given = "ARG BASE_IMAGE=registry.example.org/absent:1\nFROM ${BASE_IMAGE}\n"
    folder = make(f"ARG COLOUR=red\n{given}ARG COLOUR\nENV COLOUR=$COLOUR\n")
    done = ropewalk("build", folder, f"{folder}/", "--base", PYTHON)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(tag_of(folder)) == 1  # the same folder twice is built once
    assert "FROM" in done.stderr
    assert in_container(tag_of(folder), "printenv", "COLOUR") == "red"
    other = f"registry.example.org/x/{folder.name}:2"
    words = ("--base", PYTHON, "--build-arg", "COLOUR=blue", "-t", "{name}:1", "-t", other)
    done = ropewalk("build", folder, *words)
    assert done.returncode == 0, done.stderr
    image = engine.find_image(tag_of(folder, "1"))
    assert image is not None
    assert identity(engine, other) == image["Id"]
    assert "COLOUR=blue" in image["Config"]["Env"]
    assert image["Config"]["Labels"]["ropewalk.environment"] == folder.name
    assert containers(folder.name) == []


@pytest.mark.parametrize("mount", MOUNTS)
def test_an_image_goes_when_another_takes_its_name(make: Make, engine: DockerEngine, mount: str) -> None:
    def anew() -> str:
        folder = make(f"{PLAIN}RUN {mount}echo {uuid.uuid4().hex} > /kept\n")
        done = ropewalk("build", folder)
        assert done.returncode == 0, done.stderr
        return str(identity(engine, tag_of(folder)))

    first = anew()
    folder = make(PLAIN)
    second = anew()
    assert identity(engine, first) is None
    # What has another name stays, and so does what a container was made of.
    docker("tag", second, f"{folder.name}:kept")
    third = anew()
    assert identity(engine, f"{folder.name}:kept") == second
    container = docker("create", third)
    try:
        anew()
        assert identity(engine, third) == third
    finally:
        docker("rm", container)
    # What another command made is not ours to remove, even where its name is taken.
    text = f"{PLAIN}LABEL t={folder.name}\n"
    surroundings = {**os.environ, "DOCKER_BUILDKIT": "0"}
    other = docker("build", "-q", "-t", tag_of(folder), "-", input=text, env=surroundings)
    anew()
    assert identity(engine, other) == other
    docker("image", "rm", other)


def test_a_failing_step_shows_what_it_said_and_the_rest_goes_on(make: Make, mark: str) -> None:
    wrong = make(f"{PLAIN}RUN echo {mark} said this && exit 7\n", name="wrong")
    right = make(f"{PLAIN}RUN true\n", name="right")
    done = ropewalk("build", wrong, right)
    assert done.returncode == 1
    assert f"{mark} said this" in done.stderr
    assert "returned a non-zero code: 7" in done.stderr
    assert "correct that step of the Dockerfile" in done.stderr
    assert f"1 of 2 failed: {wrong}" in done.stderr
    assert done.stdout.split()[0] == tag_of(right)
    assert containers(mark) == []


@pytest.mark.parametrize("mount", MOUNTS)
def test_ctrl_c_ends_the_build_and_leaves_nothing(
    make: Make, engine: DockerEngine, mark: str, mount: str
) -> None:
    # The step says by a number in the list of processes that it runs.
    seconds = str(100_000 + int(mark, 16) % 800_000)
    folder = make(f"{PLAIN}RUN {mount}sleep {seconds}\n")

    def running() -> bool:
        found = subprocess.run(["pgrep", "-f", f"^sleep {seconds}"], capture_output=True, timeout=20)
        return found.returncode == 0

    process = subprocess.Popen(
        [sys.executable, "-m", "openenv_core.cli", "build", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        until(running, "the step to run")
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Traceback" not in said
    until(lambda: not running(), "the step to end")
    until(lambda: not containers(seconds), "its container to go")
    assert not engine.has_image(tag_of(folder))


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < end, f"waited for {what}"
        time.sleep(0.1)


# ---- ropewalk push


@pytest.fixture
def image(tmp_path: Path, mark: str) -> Iterator[str]:
    """A small image of its own, so that its layers are in no registry."""
    folder = tmp_path / "image"
    folder.mkdir()
    # As little as can run, so that a push takes no time: a program without libraries, which every Linux has.
    program = shutil.which("ldconfig", path="/sbin:/usr/sbin")
    if program is None:
        pytest.skip("needs ldconfig, as Linux has it")
    shutil.copyfile(program, folder / "program")
    (folder / "program").chmod(0o755)
    (folder / "mark").write_text(mark)
    (folder / "Dockerfile").write_text('FROM scratch\nCOPY program mark /\nCMD ["/program", "--version"]\n')
    name = f"ropewalk-test-{mark}:1"
    docker("build", "--tag", name, str(folder))
    yield name
    remove_images(f"reference=*/*/{name}", f"reference=*/{name}", f"reference={name}")


def test_what_is_pushed_can_be_had_again_by_who_has_logged_in(
    engine: DockerEngine, image: str, tmp_path: Path
) -> None:
    config = tmp_path / "config"
    config.mkdir()
    with running_registry(tmp_path, password=True) as registry:

        def push(password: str | None) -> subprocess.CompletedProcess[str]:
            if password is not None:
                word = base64.b64encode(f"{USER}:{password}".encode()).decode()
                stored = {"auths": {registry.address: {"auth": word}}}
                (config / "config.json").write_text(json.dumps(stored))
            words = ("push", image, "--registry", f"{registry.address}/team")
            return ropewalk(*words, DOCKER_CONFIG=str(config))

        for wrong in (None, "another"):
            done = push(wrong)
            assert (done.returncode, done.stdout) == (1, "")
            assert f"`docker login {registry.address}`" in done.stderr
        done = push(PASSWORD)
        assert done.returncode == 0, done.stderr
        remote, digest = done.stdout.split()
        assert remote == f"{registry.address}/team/{image}"
        assert digest.startswith("sha256:")
        assert ": Pushed" in done.stderr
        before = identity(engine, image)
        docker("image", "rm", image, remote)
        assert identity(engine, str(before)) is None
        docker("pull", remote, env={**os.environ, "DOCKER_CONFIG": str(config)})
        assert identity(engine, remote) == before
        assert "ldconfig" in docker("run", "--rm", remote)


def test_pushes_that_fail_are_failures_and_others_go_on(
    engine: DockerEngine, image: str, tmp_path: Path
) -> None:
    done = ropewalk("push", image, "--registry", "127.0.0.1:1/team")
    assert (done.returncode, done.stdout) == (1, "")
    assert "connection refused" in done.stderr
    # The name that the push needed is gone again.
    assert not engine.has_image(f"127.0.0.1:1/team/{image}")
    with running_registry(tmp_path, read_only=True) as registry:
        # Uploads fail in the middle, within an answer of the engine whose status is 200.
        done = ropewalk("push", image, "--registry", f"{registry.address}/team")
        assert (done.returncode, done.stdout) == (1, "")
    (tmp_path / "more").mkdir()
    with running_registry(tmp_path / "more") as registry:
        done = ropewalk("push", "ropewalk-test-nothing:1", image, "--registry", registry.address)
        assert done.returncode == 1
        assert "ropewalk-test-nothing:1 here, got none; `ropewalk build` makes it" in done.stderr
        assert "1 of 2 did not arrive" in done.stderr
        assert done.stdout.startswith(f"{registry.address}/{image}  sha256:")
