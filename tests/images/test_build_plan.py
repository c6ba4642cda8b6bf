"""The plan of a build and a push: what would be built, and where it would go."""

import re
from pathlib import Path

import pytest

from openenv_core.cli.main import main
from openenv_core.errors import ConfigurationError
from openenv_core.images import base, push
from openenv_core.images.build import (
    complete_tags,
    default_tag,
    plan,
    read_base,
    read_build_args,
    read_dockerfile,
    variant_for,
)
from openenv_core.images.engine import BuildError, BuildRequest, build_image

ROOT = Path(__file__).parents[2]
DOCKERFILE = "ARG BASE_IMAGE=ropewalk-base:latest\nARG COLOUR=red\nFROM ${BASE_IMAGE}\nARG COLOUR\n"


def folder(tmp_path: Path, *, dockerfile: str = DOCKERFILE, name: str = "dice_env") -> Path:
    env_folder = tmp_path / name
    (env_folder / "server").mkdir(parents=True)
    (env_folder / "server" / "Dockerfile").write_text(dockerfile)
    (env_folder / "openenv.yaml").write_text(f'spec_version: 1\nname: "{name}"  # so\nport: 8000\n')
    return env_folder


def test_image_is_named_after_its_environment() -> None:
    for name, tag in (
        ("Dice-Env", "dice-env"),
        ("my.env", "my-env"),
        ("two words", "two-words-env"),
        ("env", "env-env"),
    ):
        assert default_tag(name) == f"{tag}:latest"
    with pytest.raises(ConfigurationError, match="give one with --tag"):
        default_tag("___")


def test_tags_are_completed_and_impossible_ones_refused() -> None:
    for tag, becomes in (
        ("a", "a:latest"),
        ("localhost:5000/a:2", "localhost:5000/a:2"),
        ("127.0.0.1:5000/x/{name}:2", "127.0.0.1:5000/x/dice-env:2"),
        ("host:5000/{name}", "host:5000/dice-env:latest"),
    ):
        assert complete_tags([tag], "dice_env") == [becomes]
    for tag in ("", "A:1", "a:", ":1", "a b", "a//b", "a:b:c", "-a", "https://a/b"):
        with pytest.raises(ConfigurationError, match="expected an image's name"):
            complete_tags([tag], "dice_env")


def test_plan_of_a_folder(tmp_path: Path) -> None:
    build_plan = plan(folder(tmp_path), build_args={"COLOUR": "blue"})
    assert build_plan.variant is base.Variant.RUNTIME
    request = build_plan.request
    assert request.labels == {"ropewalk.environment": "dice_env"}
    assert (request.dockerfile, request.tags) == ("server/Dockerfile", ("dice-env:latest",))
    assert request.build_args == {"COLOUR": "blue", "BASE_IMAGE": base.tags(base.Variant.RUNTIME)[0]}
    text = "ARG BASE_IMAGE=registry.example.org/team/openenv-base:latest\nFROM ${BASE_IMAGE}\n"
    released = plan(folder(tmp_path, dockerfile=text, name="released_env"))
    assert released.request.build_args == {"BASE_IMAGE": base.tags(base.Variant.BUILD)[0]}


@pytest.mark.parametrize(
    ("path", "text"), [(".env", "KEY=1"), ("keys/id_rsa", ""), ("server/app.py", f"TOKEN = 'hf_{'a' * 20}'")]
)
def test_a_folder_with_a_secret_is_refused_unless_it_is_ignored(path: str, text: str, tmp_path: Path) -> None:
    env_folder = folder(tmp_path)
    (env_folder / path).parent.mkdir(exist_ok=True)
    (env_folder / path).write_text(text)
    (env_folder / ".env.example").write_text("KEY=\n")
    with pytest.raises(ConfigurationError, match=f"files without secrets, got what may hold one in {path};"):
        plan(env_folder)
    (env_folder / ".dockerignore").write_text(f"{path}\n")
    plan(env_folder)


def test_another_base_replaces_the_default(tmp_path: Path) -> None:
    env_folder, named = folder(tmp_path), {"BASE_IMAGE": "mine:1"}
    build_plan = plan(env_folder, build_args=named)
    assert build_plan.variant is None
    assert build_plan.request.build_args == named


def test_the_base_follows_from_the_default_of_its_arg() -> None:
    runtime, build = base.Variant.RUNTIME, base.Variant.BUILD
    for default, variant in (
        ("ropewalk-base:latest", runtime),
        ("ropewalk-base", runtime),
        ('"ropewalk-base:latest"', runtime),
        ("ropewalk-base:0.1.0-build", build),
        ("ropewalk-base:build", build),
        ("registry.example.org/team/openenv-base:latest", build),
        ("openenv-base", build),
        ("python:3.11-slim", None),
        ("example.org/my-openenv-base-image:1", None),
    ):
        for use in ("${BASE_IMAGE}", "$BASE_IMAGE AS builder", "--platform=linux/amd64 ${BASE_IMAGE:-x}"):
            text = f"# a comment\narg BASE_IMAGE={default}\nFROM {use}\nARG BASE_IMAGE\nFROM alpine:3\n"
            assert variant_for(read_base(text)) is variant
    assert read_base("ARG BASE_IMAGE\nFROM $BASE_IMAGE\n") == ""
    # An ARG that no stage stands on asks for none.
    for text in ("ARG BASE_IMAGE=ropewalk-base\nFROM python:3.11\n", "FROM ropewalk-base:latest\n"):
        assert read_base(text) is None


def test_each_environment_uses_the_base_and_its_user() -> None:
    files = list(ROOT.glob("envs/*/server/Dockerfile"))
    assert files
    for file in files:
        text = read_dockerfile(file)
        assert variant_for(read_base(text)) is base.Variant.RUNTIME, file
        assert re.findall(r"(?m)^USER (.+)$", text)[-1] == "env", file
        assert (file.parents[1] / ".dockerignore").is_file(), file


def test_a_dockerfile_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    env_folder = folder(tmp_path)
    (env_folder / "server" / "Dockerfile").write_bytes("FROM x # Würfel".encode("latin-1"))
    with pytest.raises(ConfigurationError, match="expected a readable Dockerfile at"):
        plan(env_folder)


def test_build_arguments_come_from_the_line_or_the_shell() -> None:
    assert read_build_args(["A=1=2", "B=", "HERE"]) == {"A": "1=2", "B": "", "HERE": None}


def test_a_folder_without_a_manifest_is_built_and_one_that_is_no_environment_refused(tmp_path: Path) -> None:
    odd_folder, env_folder = folder(tmp_path, name="Odd Folder"), folder(tmp_path)
    (odd_folder / "openenv.yaml").unlink()
    odd = plan(odd_folder)
    assert odd.request.tags == ("odd-folder-env:latest",)
    for place, words in (
        (env_folder / "server", f"a part of one: .* build {env_folder}"),
        (tmp_path, "with neither openenv.yaml nor a Dockerfile"),
        (tmp_path / "absent", "no environment's folder"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            plan(place)
    (tmp_path / "openenv.yaml").write_text("name: a\n")
    with pytest.raises(ConfigurationError, match=r"expected a Dockerfile at server/Dockerfile or Dockerfile"):
        plan(tmp_path)


def test_dockerfile_is_found_at_the_root_or_below_server(tmp_path: Path) -> None:
    env_folder = folder(tmp_path)
    (env_folder / "Dockerfile").write_text("FROM a\n")
    assert plan(env_folder).request.dockerfile == "server/Dockerfile"
    (env_folder / "server" / "Dockerfile").unlink()
    assert plan(env_folder).request.dockerfile == "Dockerfile"


def test_invalid_commands_fail_before_an_engine_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nothing.sock")
    one, two = str(folder(tmp_path)), str(folder(tmp_path / "more"))
    for arguments, expected in (
        ([one, two], "both become dice-env:latest"),
        ([one, two, "--tag", "a:1"], "expected {name} in the tags of several"),
        (["base", "--tag", "a:1"], "the base's names say its version"),
        ([str(tmp_path)], "neither openenv.yaml nor a Dockerfile"),
        (["no_such_thing"], "expected an environment's name, got 'no_such_thing'"),
        ([one], "systemctl start docker"),  # possible: the engine is asked last
    ):
        assert main(["build", *arguments]) == 2
        assert expected in capsys.readouterr().err


def docker_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Put a stand-in for the command `docker` first on the PATH; it runs the script."""
    command = tmp_path / "bin" / "docker"
    command.parent.mkdir()
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}:/usr/bin:/bin")


def test_docker_output_passes_through_and_its_failure_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    docker_that(tmp_path, monkeypatch, "echo Step 1/1; echo the --mount option requires BuildKit >&2; exit 1")
    request = BuildRequest(context=tmp_path, dockerfile="Dockerfile", tags=("a:1",))
    with pytest.raises(BuildError, match="exit status 1"):
        build_image(request)
    assert capsys.readouterr().err == "Step 1/1\nthe --mount option requires BuildKit\n"
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigurationError, match="there is no command `docker`"):
        build_image(request)


def test_a_request_becomes_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docker_that(tmp_path, monkeypatch, f'echo "$@" >{tmp_path}/words; echo sha256:1 >"$4"')
    request = BuildRequest(
        context=tmp_path,
        dockerfile="D",
        tags=("a:1", "b:2"),
        build_args={"A": "1 2", "HOME": None},
        labels={"l": "x"},
        target="t",
    )
    assert build_image(request) == "sha256:1"
    arguments = (tmp_path / "words").read_text().split(" ", 4)[4]
    assert arguments == (
        f"--file {tmp_path}/D --tag a:1 --tag b:2 --build-arg A=1 2 --build-arg HOME --label l=x --target t "
        f"{tmp_path}\n"
    )


def test_an_image_s_name_in_a_registry() -> None:
    for image, registry, remote in (
        ("a-env", "registry.example.org/team", "registry.example.org/team/a-env:latest"),
        ("a-env:1", "registry.example.org/team/", "registry.example.org/team/a-env:1"),
        ("old.example.org/x/a-env:1", "localhost:5000", "localhost:5000/a-env:1"),
        ("a-env:1", "host:5000", "host:5000/a-env:1"),
        ("a-env:1", "docker.io/me", "docker.io/me/a-env:1"),
        ("registry.example.org/me/a-env:1", None, "registry.example.org/me/a-env:1"),
        ("localhost/a", None, "localhost/a:latest"),
    ):
        assert push.remote_name(image, registry) == remote
    for registry in ("", "team", "https://a.b/c", "a.b/Team", "a.b/c:1", "a.b//c", "a.b/c d"):
        with pytest.raises(ConfigurationError, match="expected --registry HOST"):
            push.remote_name("a-env:1", registry)
    for image in ("a-env", "team/a-env:1"):
        with pytest.raises(ConfigurationError, match=r"no registry, got none; for one, --registry "):
            push.remote_name(image, None)
