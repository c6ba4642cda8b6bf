"""What crosses the wire: which actions there are, what the schema says of them, and the two shapes of observations."""

import json
from dataclasses import replace
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from envs.code_interpreter_env import (
    CodeInterpreterObservation,
    Execute,
    GetFile,
    PutFile,
    Restart,
    Submit,
)
from envs.code_interpreter_env.models import AnyAction, ListTools
from envs.code_interpreter_env.server.observations import full, released
from openenv_core.checker.drawing.sampling import sample
from openenv_core.protocol.replies import encode_observation
from openenv_core.sandbox import CodeError, Execution, FileInfo, Output, Truncated
from openenv_core.tools import CallToolAction

ACTIONS: TypeAdapter[Any] = TypeAdapter(AnyAction)

EXECUTION = Execution(
    status="error",
    stdout="out\n",
    stderr="err\n",
    exit_code=1,
    error=CodeError(ename="ValueError", evalue="no", traceback=("a", "b")),
    result="3",
    outputs=(Output(output_type="display_data", data={"image/png": "AAEC"}, metadata={"a": {"b": 1}}),),
    execution_count=4,
    session_id="s",
    state_lost=True,
    truncated=Truncated(stdout=True),
    signal=9,
    execution_time_s=0.25,
    max_rss_bytes=1024,
    files=(FileInfo(path="a/b", size=3, sha256="ff"),),
    isolation="lsm",
    reason="why",
)


class ReleasedObservation(BaseModel):
    """The released package's model of a coding environment's observation, as its client reads it."""

    model_config = ConfigDict(extra="forbid")

    done: bool = False
    reward: bool | int | float | None = None
    metadata: dict[str, Any] = {}
    stdout: str = ""
    stderr: str = ""
    exit_code: int = 0


@pytest.mark.parametrize(
    ("data", "action"),
    [
        ({"code": "1"}, Execute(code="1")),
        (
            {"type": "execute", "code": "1", "timeout_s": 2, "stdin": "x"},
            Execute(code="1", timeout_s=2, stdin="x"),
        ),
        ({"type": "put_file", "path": "a", "content": "é"}, PutFile(path="a", content="é")),
        (
            {"type": "put_file", "path": "a", "content_base64": "AAEC"},
            PutFile(path="a", content_base64="AAEC"),
        ),
        ({"type": "get_file", "path": "a"}, GetFile(path="a")),
        ({"type": "restart"}, Restart()),
        ({"type": "submit", "code": "1"}, Submit(code="1")),
        ({"type": "list_tools"}, ListTools()),
        ({"tool_name": "a", "arguments": {"b": 1}}, CallToolAction(tool_name="a", arguments={"b": 1})),
        ({"type": "call_tool", "tool_name": "a"}, CallToolAction(tool_name="a")),
    ],
)
def test_every_action_is_told_by_its_type(data: dict[str, Any], action: Any) -> None:
    assert ACTIONS.validate_json(json.dumps(data)) == action
    assert ACTIONS.validate_python(data) == action
    assert ACTIONS.validate_python(action) is action


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"type": "unknown"},
        {"type": None, "code": "1"},
        {"type": "execute"},
        {"code": 1},
        {"code": "1", "timeout_s": 0},
        {"code": "1", "timeout_s": float("inf")},
        {"code": "1", "shell": True},
        {"code": "x" * ((1 << 20) + 1)},
        {"type": "put_file", "path": "a"},
        {"type": "put_file", "path": "a", "content": "x", "content_base64": "AAEC"},
        {"type": "put_file", "path": "a", "content_base64": "***"},
        {"type": "put_file", "path": "", "content": ""},
        {"type": "get_file"},
        {"type": "restart", "code": "1"},
    ],
)
def test_what_is_no_action_is_refused(data: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ACTIONS.validate_python(data)


@pytest.mark.parametrize("modest", [True, False])
def test_whatever_the_schema_allows_is_an_action(modest: bool) -> None:
    drawn = sample(ACTIONS.json_schema(), 80, 1, modest=modest)
    actions = [ACTIONS.validate_python(action) for action in drawn]
    own = {Execute, PutFile, GetFile, Restart, Submit}
    assert {type(action) for action in actions} == own | {ListTools, CallToolAction}
    bare = {type(action) for action, data in zip(actions, drawn, strict=True) if "type" not in data}
    assert bare == {Execute, CallToolAction}
    assert all(isinstance(action.data, bytes) for action in actions if isinstance(action, PutFile))


def test_a_file_s_content_is_bytes_however_it_came() -> None:
    assert PutFile(path="a", content="é").data == "é".encode()
    assert PutFile(path="a", content="").data == b""
    assert PutFile(path="a", content_base64="AAEC").data == b"\x00\x01\x02"


def test_the_released_shape_has_no_other_key() -> None:
    envelope = json.loads(encode_observation(released(EXECUTION, "code")))["data"]
    observation = envelope["observation"]
    assert list(observation) == ["metadata", "stdout", "stderr", "exit_code"]
    seen = ReleasedObservation.model_validate(observation)
    # Whoever has three fields finds everything there that is in words.
    assert (seen.stdout, seen.stderr, seen.exit_code) == ("out\n", "err\na\nb\nwhy\n", 1)
    assert released(replace(EXECUTION, stderr="half", reason=None), "code").stderr == "half\na\nb\n"
    assert released(replace(EXECUTION, error=None, reason=None, stderr="half"), "code").stderr == "half"
    bare = replace(EXECUTION, error=CodeError(ename="E", evalue="v"), reason=None, stderr="")
    assert released(bare, "code").stderr == "E: v\n"
    assert seen.metadata["last_code"] == "code"
    assert seen.metadata == envelope["metadata"]
    # And with the fields of the full shape the same model refuses it, which is why there are two.
    with pytest.raises(ValidationError):
        ReleasedObservation.model_validate(
            json.loads(encode_observation(full(EXECUTION)))["data"]["observation"]
        )


def test_both_shapes_are_read_into_the_same_fields() -> None:
    read = {}
    for name, observation in (("full", full(EXECUTION)), ("released", released(EXECUTION, None))):
        data = json.loads(encode_observation(observation))["data"]
        read[name] = CodeInterpreterObservation.model_validate(
            {**data["observation"], "reward": data["reward"], "done": data["done"]}
        )
    assert read["full"] == read["released"]
    for field in ("status", "stdout", "error", "outputs", "truncated", "files", "state_lost", "isolation"):
        assert getattr(read["full"], field) == getattr(EXECUTION, field)


def test_every_field_of_an_execution_is_one_of_the_observation() -> None:
    assert set(Execution.__dataclass_fields__) <= set(CodeInterpreterObservation.model_fields)
    schema = CodeInterpreterObservation.model_json_schema()
    assert "required" not in schema  # so that the released shape follows it too
