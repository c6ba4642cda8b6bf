"""Pushing to the distribution's own registry server, and having from it what was pushed."""

import base64
import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest
from registry_server import PASSWORD, USER, Registry, running_registry

from openenv_core.providers.docker import Engine

pytestmark = [
    pytest.mark.docker,
    pytest.mark.soak,
    pytest.mark.timeout(600),
]  # the first may have to install the server


@pytest.fixture
def api(engine: Engine) -> Iterator[docker.APIClient]:
    client = docker.APIClient(base_url=engine.address.url)
    yield client
    client.close()


@pytest.fixture
def image(api: docker.APIClient, tmp_path: Path) -> Iterator[str]:
    """A small image of its own, so that its layers are in no registry."""
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
    command = [sys.executable, "-m", "openenv_core.cli", "push", image, *words]
    return subprocess.run(command, env=surroundings, capture_output=True, text=True, timeout=100, check=False)


def digests(api: docker.APIClient, name: str) -> list[str]:
    return [digest.partition("@")[2] for digest in api.inspect_image(name)["RepoDigests"] or ()]


def test_what_is_pushed_can_be_had_again(api: docker.APIClient, image: str, tmp_path: Path) -> None:
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
        assert digests(api, remote) == [digest]
        run = ["docker", "run", "--rm", remote]
        assert (
            "ldconfig" in subprocess.run(run, capture_output=True, text=True, timeout=60, check=True).stdout
        )


def test_an_image_that_is_not_here_is_told_apart(engine: Engine) -> None:
    done = push("ropewalk-test-nothing:1", "--registry", "127.0.0.1:1/team")
    assert done.returncode == 1
    assert (
        "expected an image ropewalk-test-nothing:1 here, got none; `ropewalk build` makes it" in done.stderr
    )


def test_a_registry_that_is_not_there_is_told_apart(api: docker.APIClient, image: str) -> None:
    done = push(image, "--registry", "127.0.0.1:1/team")
    assert done.returncode == 1
    assert "connection refused" in done.stderr
    assert "see that 127.0.0.1:1 is right and reachable from the engine" in done.stderr
    assert done.stdout == ""
    # The name that the push needed is gone again.
    with pytest.raises(docker.errors.ImageNotFound):
        api.inspect_image(f"127.0.0.1:1/team/{image}")


def login(config: Path, registry: Registry, password: str) -> None:
    word = base64.b64encode(f"{USER}:{password}".encode()).decode()
    config.mkdir(exist_ok=True)
    (config / "config.json").write_text(json.dumps({"auths": {registry.address: {"auth": word}}}))


def test_who_we_are_is_what_docker_login_has_stored(image: str, tmp_path: Path) -> None:
    config = tmp_path / "config"
    with running_registry(tmp_path, password=True) as registry:
        words = ("--registry", f"{registry.address}/team")
        config.mkdir()
        for wrong in (None, "another"):
            if wrong is not None:
                login(config, registry, wrong)
            done = push(image, *words, config=config)
            assert done.returncode == 1
            assert f"`docker login {registry.address}`" in done.stderr
            assert done.stdout == ""
        login(config, registry, PASSWORD)
        done = push(image, *words, config=config)
        assert done.returncode == 0, done.stderr


def test_a_registry_that_takes_nothing_is_a_failure_and_no_success(image: str, tmp_path: Path) -> None:
    with running_registry(tmp_path, read_only=True) as registry:
        # Uploads fail in the middle, within an answer of the engine whose status is 200.
        done = push(image, "--registry", f"{registry.address}/team")
        assert done.returncode == 1
        assert "expected" in done.stderr
        assert done.stdout == ""


def test_others_are_pushed_after_one_has_failed(image: str, tmp_path: Path) -> None:
    with running_registry(tmp_path) as registry:
        done = push("ropewalk-test-nothing:1", image, "--registry", registry.address)
        assert done.returncode == 1
        assert "1 of 2 did not arrive" in done.stderr
        assert done.stdout.startswith(f"{registry.address}/{image}  sha256:")
