"""Every static check: passed by a good environment, failed by one with the fault that it looks for."""

from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, field_validator
from subjects import DOCKERFILE, Here, Loose, Walk, WalkState, folder_with, look, of_folder, run, walk

from openenv_core import Action, Observation, State
from openenv_core.checker.check import CheckLevel, checks
from openenv_core.checker.results import Status
from openenv_core.tools import CallToolAction

UNDECLARED = {"declared_tools", "example_actions", "reserved_tool_names"}
IMAGES = {"image_user", "image_health", "image_port", "image_size"}
"""tests/docker looks at those."""


def test_a_good_environment_passes(tmp_path: Path) -> None:
    with Here(walk(), folder_with(tmp_path)) as subject:
        report = run(subject, [one for one in checks() if one.level is CheckLevel.STATIC])
    assert report.ok, report.of(Status.FAILED, Status.CRASHED)
    assert {one.check for one in report.of(Status.SKIPPED)} == UNDECLARED | IMAGES


def dockerfile(before: str, after: str) -> dict[str, Any]:
    assert before in DOCKERFILE
    return {"dockerfile": DOCKERFILE.replace(before, after)}


def in_validation(text: str) -> dict[str, Any]:
    return {"manifest": f"spec_version: 1\nname: x\nvalidation: {{{text}}}\n"}


ELSEWHERE = "ARG BASE_IMAGE=python:3.11-slim\nFROM ${BASE_IMAGE}\n"


@pytest.mark.parametrize(
    ("check", "files", "words"),
    [
        ("manifest_present", {"manifest": None}, "got none"),
        ("manifest_valid", {"manifest": "spec_version: 1\nname: x\nprot: 8000\n"}, "did you mean 'port'"),
        ("manifest_valid", {"manifest": "{"}, "to be YAML"),
        ("manifest_valid", in_validation("reward: {range: [1, 0]}"), "lower end first"),
        ("manifest_app", {"manifest": "spec_version: 1\nname: x\napp: sever.app:app\n"}, "no sever/app.py"),
        ("readme", {"readme": "# Walk\n"}, "got 2 words"),
        ("dockerfile_present", {"dockerfile": None}, "got none"),
        ("dockerfile_base", {"dockerfile": "FROM python:3.11\n"}, "got FROM python:3.11"),
        (
            "dockerfile_base",
            {"dockerfile": "ARG BASE_IMAGE=a\nFROM ${BASE_IMAGE} AS one\nFROM python:3.11\n"},
            "got FROM python:3.11",
        ),
        ("dockerfile_user", dockerfile("USER env", "# USER env"), "got USER root"),
        ("dockerfile_user", {"dockerfile": ELSEWHERE}, "got no USER"),
        (
            "dockerfile_user",
            {"dockerfile": ELSEWHERE.replace("python:3.11-slim", "ropewalk-base:0.1.0-build")},
            "got no USER",
        ),
        ("dockerfile_user", dockerfile("USER env", "RUN <<EOF\nUSER env\nEOF\nUSER 0:0"), "got USER 0"),
        ("dockerfile_health", {"dockerfile": ELSEWHERE}, "got none"),
        ("dockerfile_health", dockerfile('CMD ["healthcheck"]', "NONE"), "got HEALTHCHECK NONE"),
        ("dockerfile_port", {"dockerfile": ELSEWHERE}, "no EXPOSE"),
        ("dockerfile_port", dockerfile('"--port", "8000"', '"--port", "9000"'), "got port 9000"),
        (
            "dockerfile_port",
            {"manifest": "spec_version: 1\nname: x\nport: 7000\n", "dockerfile": ELSEWHERE + "EXPOSE 8000"},
            "got port 8000",
        ),
        (
            "dockerfile_sources",
            dockerfile("COPY . /app/env", "ADD https://a.org/b /b"),
            "ADD https://a.org/b",
        ),
        ("dockerfile_secrets", dockerfile("EXPOSE 8000", "ENV API_KEY=abc"), "ENV API_KEY with a value"),
        ("dockerfile_secrets", dockerfile("EXPOSE 8000", "ENV A='b c' API_KEY=abc"), "API_KEY with a value"),
        ("dockerfile_secrets", dockerfile("EXPOSE 8000", f"RUN login hf_{'a' * 20}"), "on line 7"),
        ("dockerfile_secrets", {".env": "KEY=1"}, "got .env"),
        ("dockerfile_secrets", dockerfile("COPY . /app", "COPY keys/id_rsa /app/.ssh"), "got keys/id_rsa"),
        *(
            ("dockerfile_secrets", {".env": "KEY=1", **dockerfile("COPY . /app/env", copy)}, "got .env")
            for copy in ('COPY --chown=env [".", "/app/env"]', "COPY / /app/env", "COPY .e* /app/env")
        ),
    ],
)
def test_a_fault_in_a_folder_is_found(check: str, files: Any, words: str, tmp_path: Path) -> None:
    result = of_folder(check, folder_with(tmp_path, **files))
    assert result.status is Status.FAILED, result
    assert words in result.message
    assert result.change


@pytest.mark.parametrize(
    "files",
    [
        {".env": "KEY=1", ".dockerignore": ".env\n"},
        {".env.example": "KEY=\n"},
        dockerfile("EXPOSE 8000", "ENV API_KEY=${GIVEN_LATER}"),
        dockerfile("EXPOSE 8000", "ENV TOKENIZERS_PARALLELISM=false"),
        dockerfile("EXPOSE 8000", "COPY --link --from=base /etc/ssl /etc/ssl"),
    ],
)
def test_files_kept_out_of_the_image_are_no_secrets(files: Any, tmp_path: Path) -> None:
    result = of_folder("dockerfile_secrets", folder_with(tmp_path, **files))
    assert result.status is Status.PASSED, result


def test_settings_of_the_base_image_need_not_be_repeated(tmp_path: Path) -> None:
    folder_with(
        tmp_path, dockerfile="ARG BASE_IMAGE=reg.org/ropewalk-base:0.1.0\nFROM ${BASE_IMAGE} AS a\nFROM a\n"
    )
    for check in ("dockerfile_base", "dockerfile_user", "dockerfile_health", "dockerfile_port"):
        assert of_folder(check, tmp_path).status is Status.PASSED, check


class Foreign(BaseModel):
    model_config = ConfigDict(extra="forbid")
    by: int = 1


class Odd:
    pass


class Unrepresentable(Observation):
    engine: Odd | None = None


class WrongReward(Observation):
    reward: dict[str, float] = Field(default_factory=dict)  # type: ignore[assignment]


class WrongCount(State):
    step_count: str = "none"  # type: ignore[assignment]


class Narrower(Action):
    word: str

    @field_validator("word")
    @classmethod
    def _magic(cls, value: str) -> str:
        if value != "open sesame":
            raise ValueError("expected the magic word")
        return value


class Close(CallToolAction):
    tool_name: Literal["roll", "close"]


class MethodForState(Walk):
    def state(self) -> WalkState:  # type: ignore[override]
        return self._state


class StateOnly:
    SUPPORTS_CONCURRENT_SESSIONS = True
    state = None


@pytest.mark.parametrize(
    ("check", "app", "words"),
    [
        ("environment_methods", walk(MethodForState), "got a method"),
        ("environment_methods", walk(StateOnly), "StateOnly.reset to be a method"),
        ("models_derived", walk(action=Foreign), "lacks metadata"),
        ("models_forbid_unknown_keys", walk(action=Loose), "got extra='ignore'"),
        ("models_have_schemas", walk(observation=Unrepresentable), "Unrepresentable"),
        ("reserved_fields", walk(observation=WrongReward), "WrongReward.reward"),
        ("reserved_fields", walk(state=WrongCount), "WrongCount.step_count"),
        ("reserved_tool_names", walk(action=Close), "got close"),
        ("action_schema_agrees", walk(action=Narrower), "32 of 32 refused"),
    ],
)
def test_a_fault_in_a_model_is_found(check: str, app: Any, words: str) -> None:
    result = look(check, app)
    assert result.status is Status.FAILED, result
    assert words in result.message
    assert result.change


class Roll(CallToolAction):
    tool_name: Literal["roll"]


def test_tools_with_names_of_their_own_pass() -> None:
    assert look("reserved_tool_names", walk(action=Roll)).status is Status.PASSED
    assert look("reserved_tool_names", walk()).status is Status.SKIPPED


@pytest.mark.parametrize(
    ("check", "validation", "status"),
    [
        ("declared_tools", "capabilities: {declared_tools: [roll]}", Status.PASSED),
        ("declared_tools", "capabilities: {declared_tools: [roll, step]}", Status.FAILED),
        ("declared_tools", "capabilities: {declared_tools: []}", Status.SKIPPED),
        ("example_actions", "episodes: {example_actions: [{by: 2}]}", Status.PASSED),
        ("example_actions", "episodes: {example_actions: [{by: 9}]}", Status.FAILED),
        ("example_actions", "episodes: {example_actions: []}", Status.SKIPPED),
    ],
)
def test_declared_tools_and_example_actions(
    check: str, validation: str, status: Status, tmp_path: Path
) -> None:
    folder_with(tmp_path, **in_validation(validation))
    assert look(check, walk(), tmp_path).status is status


def test_an_app_that_cannot_be_imported_is_a_finding(tmp_path: Path) -> None:
    folder_with(tmp_path)
    (tmp_path / "server" / "app.py").write_text("raise RuntimeError('no engine')\n")
    result = of_folder("app_importable", tmp_path)
    assert result.status is Status.FAILED
    assert "no engine" in result.message
