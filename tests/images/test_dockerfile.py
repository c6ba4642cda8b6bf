"""Parsing of Dockerfiles."""

from pathlib import Path

import pytest

from openenv_core.errors import ConfigurationError
from openenv_core.images import base
from openenv_core.images.build import variant_for
from openenv_core.images.dockerfile import Dockerfile

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('# a comment\n\nRUN a && \\\n  # in between\n\n  b\nCMD ["x"]', ["RUN a && b", 'CMD ["x"]']),
        ("RUN one \\", ["RUN one"]),
        ("RUN <<EOF\nUSER x\nEOF\nCMD b", ["RUN <<EOF", "CMD b"]),
        ("COPY <<'END' /file\nUSER x\nEND\nCMD b", ["COPY <<'END' /file", "CMD b"]),
        ("RUN echo $((1 << 4)) <<< w\nCMD b", ["RUN echo $((1 << 4)) <<< w", "CMD b"]),
    ],
)
def test_instructions_of_continued_lines_comments_and_heredocs(text: str, expected: list[str]) -> None:
    found = Dockerfile.parse(f"from python:3.11 as one\n{text}\n")
    assert [f"{one.keyword} {one.arguments}" for one in found.all] == expected


def test_escapes_and_arguments_of_the_head() -> None:
    found = Dockerfile.parse("# escape=`\nFROM a\nRUN one `\n  two\nRUN c:\\\nRUN d\n")
    assert [one.arguments for one in found.all] == ["one two", "c:\\", "d"]
    found = Dockerfile.parse('ARG A=1\nARG B\nFROM x\nARG A=2\nARG C="two words" D=4\n')
    assert found.args == {"A": "1", "B": None, "C": "two words", "D": "4"}


def test_base_is_found_below_the_stages_of_the_file() -> None:
    found = Dockerfile.parse(
        "ARG B=x\nFROM --platform=linux/amd64 ${B} AS Build\nUSER one\nFROM alpine:3\nFROM build as more\nFROM more\n"
    )
    assert (found.base, found.base_image) == ("${B}", "x")
    assert [one.arguments for one in found.final] == ["one"]


def test_a_file_without_from_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "Dockerfile"
    file.write_text("RUN a\n")
    with pytest.raises(ConfigurationError, match=r"there is no FROM in "):
        Dockerfile.read(file)


def test_the_base_follows_from_the_default_of_its_arg() -> None:
    runtime, build = base.Variant.RUNTIME, base.Variant.BUILD
    for default, variant in (
        ("ropewalk-base:latest", runtime),
        ("ropewalk-base", runtime),
        ("ropewalk-base:0.1.0-build", build),
        ("ropewalk-base:build", build),
        ("registry.example.org/team/openenv-base:latest", build),
        ("openenv-base", build),
        ("python:3.11-slim", None),
        ("example.org/my-openenv-base-image:1", None),
    ):
        dockerfile = Dockerfile.parse(f"ARG BASE_IMAGE={default}\nFROM ${{BASE_IMAGE}}\n")
        assert variant_for(dockerfile) is variant
    # An ARG that no stage stands on asks for none.
    assert variant_for(Dockerfile.parse("ARG BASE_IMAGE=ropewalk-base\nFROM python:3.11\n")) is None
    assert variant_for(Dockerfile.parse("FROM ropewalk-base:latest\n")) is None


def test_each_environment_uses_the_base_and_its_user() -> None:
    files = list(ROOT.glob("envs/*/server/Dockerfile"))
    assert files
    for file in files:
        found = Dockerfile.read(file)
        assert variant_for(found) is base.Variant.RUNTIME, file
        assert [one.arguments for one in found.all if one.keyword == "USER"][-1] == "env", file
        assert (file.parents[1] / ".dockerignore").is_file(), file
