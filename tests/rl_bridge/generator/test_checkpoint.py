"""A checkpoint as a policy of `ropewalk eval`: a real tokenizer and a scripted engine."""

from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from byte_pairs import save_byte_pairs

from openenv_core.evaluation.policies import PolicyError, RequestedCall
from openenv_core.evaluation.records import EvaluationSettings
from rl_bridge.generator.base import Engine
from rl_bridge.generator.checkpoint import CheckpointModel, _make_engine
from rl_bridge.types import Completion
from tests.rl_bridge.tokens.test_conversation import LLAMA_MARKS, LOOK, QWEN, QWEN_MARKS

pytestmark = pytest.mark.heavy

NO_TOOLS = "{% for m in messages %}{{ m.content }}<|eot_id|>{% endfor %}"


class ScriptedEngine:
    """Answers with what is left in a list, and notes its prompts."""

    def __init__(self, *answers: tuple[str, bool]) -> None:
        self.answers = list(answers)
        self.prompts: list[list[int]] = []
        self.model: Any = None

    def generate(self, prompts: Any, sampling: Any, seeds: Any) -> "Future[list[Completion]]":
        self.prompts += map(list, prompts)
        text, stopped = self.answers.pop(0)
        tokens = self.model.tokenizer.answer(text)[: None if stopped else -1]
        done: Future[list[Completion]] = Future()
        zeros = [0] * len(tokens)
        done.set_result([Completion(tokens=tokens, logprobs=zeros, versions=zeros, stopped=stopped)])
        return done


def model_of(folder: Path, engine: ScriptedEngine, max_length: int = 2000) -> CheckpointModel:
    settings = EvaluationSettings(environments=("any",), policy=str(folder), max_tokens=100)
    engine.model = CheckpointModel(settings, cast(Engine, engine), max_length)
    return cast(CheckpointModel, engine.model)


async def test_calls_are_read_and_what_they_gave_continues_the_tokens(tmp_path: Path) -> None:
    save_byte_pairs(tmp_path, QWEN, special=QWEN_MARKS, plain=("<tool_call>", "</tool_call>"))
    called = '<tool_call>\n{"name": "look", "arguments": {"at": "the sea"}}\n</tool_call>'
    engine = ScriptedEngine((called, True), ("<tool_call>{", True), ("half", False))
    chat = model_of(tmp_path, engine).begin([{"role": "user", "content": "hello"}], LOOK, seed=0)
    answer = await chat.answer()
    assert answer is not None
    assert [(call.name, call.arguments) for call in answer.calls] == [("look", {"at": "the sea"})]
    chat.add_messages([{"role": "tool", "tool_call_id": "", "name": "look", "content": "waves"}])
    unread = await chat.answer()
    assert unread is not None
    assert (unread.calls, "<tool_call>" in unread.text) == ((), True)
    first, second = engine.prompts
    assert second[: len(first)] == first
    assert "waves" in engine.model.tokenizer.raw(second[len(first) :])
    chat.add_messages([{"role": "user", "content": "error"}])
    cut = await chat.answer()  # it counts if it can be read, as in training
    assert cut is not None
    assert cut.text == "half"
    chat.add_messages([{"role": "user", "content": "go on"}])
    engine.answers.append(("whole", True))
    await chat.answer()
    end = engine.model.tokenizer.stop_token_ids[0]
    third, fourth = engine.prompts[2:]
    half = list(engine.model.tokenizer.answer("half"))
    assert fourth[: len(third) + len(half)] == third + half
    assert half[-1] == end


async def test_no_room_and_no_tools(tmp_path: Path) -> None:
    save_byte_pairs(tmp_path, QWEN, special=QWEN_MARKS)
    hello = [{"role": "user", "content": "hello"}]
    length = len(model_of(tmp_path, ScriptedEngine()).tokenizer.render_opening(hello, ()))  # type: ignore[arg-type]
    assert (
        await model_of(tmp_path, ScriptedEngine(), max_length=length).begin(hello, (), seed=0).answer()
        is None
    )
    room_for_one = model_of(tmp_path, ScriptedEngine(("h", False)), max_length=length + 1)
    assert await room_for_one.begin(hello, (), seed=0).answer() is not None
    save_byte_pairs(tmp_path / "plain", NO_TOOLS, special=LLAMA_MARKS)
    with pytest.raises(PolicyError, match="tells the policy of its tools"):
        model_of(tmp_path / "plain", ScriptedEngine()).begin(
            [{"role": "user", "content": "hello"}], LOOK, seed=0
        )


@pytest.mark.parametrize(("device", "dtype"), [("cpu", "float32"), ("cuda", "bfloat16")])
def test_it_computes_in_what_a_run_on_the_device_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, dtype: str
) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 2000}')
    monkeypatch.setattr("rl_bridge.devices.own_device", lambda: torch.device(device))
    engine, _ = _make_engine(EvaluationSettings(environments=("any",), policy=str(tmp_path)))
    assert cast(Any, engine)._config.model.dtype == dtype


def test_a_call_is_shown_as_text() -> None:
    from openenv_core.evaluation.policies import ChatAnswer

    answer = ChatAnswer("I look.", (RequestedCall("", "look", {"at": "the sea"}),))
    assert answer.shown == 'I look.\n<tool_call>{"name": "look", "arguments": {"at": "the sea"}}</tool_call>'
