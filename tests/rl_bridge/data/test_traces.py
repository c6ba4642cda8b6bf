"""Traces: recording an episode, reading and writing files, and which tokens are learned."""

import json
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest

from openenv_core import Observation, StepResult
from openenv_core.errors import ToolCallError
from openenv_core.outcomes import INFRASTRUCTURE_ERROR
from openenv_core.tools import (
    CallToolAction,
    CallToolObservation,
    ListToolsAction,
    ListToolsObservation,
    Tool,
    ToolError,
    ToolErrorType,
)
from rl_bridge.config import Config
from rl_bridge.data.traces import Recorder, Trace, load_traces, save_traces
from rl_bridge.errors import ConfigError, EpisodeLostError
from rl_bridge.rollout import ToolTask
from rl_bridge.tokens.tool_calls import CallStyle, parse_tool_calls


class Riddle(Observation):
    task: str


class RiddleSession:
    """`look` tells a number, `say` ends the episode; it earns 1 with the right one."""

    def __init__(self, *, broken: bool = False) -> None:
        self.resets: list[dict[str, Any]] = []
        self._broken = broken

    async def reset(self, **options: Any) -> StepResult[Any]:
        self.resets.append(options)
        return StepResult(Riddle(task="what is the number?"), None, False)

    async def step(self, action: Any, /) -> StepResult[Any]:
        if isinstance(action, ListToolsAction):
            schema = {"type": "object", "properties": {}}
            tools = [Tool(name=name, description=name, input_schema=schema) for name in ("look", "say")]
            return StepResult(ListToolsObservation(tools=tools), None, False)
        assert isinstance(action, CallToolAction)
        found, name = partial(CallToolObservation, tool_name=action.tool_name), action.tool_name
        if self._broken:
            return StepResult(found(metadata={INFRASTRUCTURE_ERROR: "the disk is gone"}), None, False)
        if name == "look":
            return StepResult(found(result={"number": 7}), 0.25, False)
        if name == "say":
            return StepResult(found(result="heard"), float(action.arguments == {"number": 7}), True)
        error = ToolError(error_type=ToolErrorType.TOOL_NOT_FOUND, message="there is no such tool")
        return StepResult(found(error=error), -0.5, False)


@pytest.fixture
def task(tmp_path: Path) -> ToolTask:
    return ToolTask(Config.model_validate({"rollout": {}}), tmp_path)


async def record_trace(task: ToolTask) -> Trace:
    recorder = Recorder(task, RiddleSession())
    await recorder.begin(3)
    seen = await recorder.call("look", {})
    await recorder.call("say", {"number": seen["number"]})
    return recorder.trace()


async def test_a_trace_is_what_a_policy_would_have_read_and_written(task: ToolTask, tmp_path: Path) -> None:
    session = RiddleSession()
    recorder = Recorder(task, session)
    first = await recorder.begin(3, level="easy")
    assert first.task == "what is the number?"
    assert session.resets == [{"seed": 3, "level": "easy"}]
    assert await recorder.call("look", {}) == {"number": 7}
    with pytest.raises(ValueError, match="goes on"):
        recorder.trace()
    await recorder.call("say", {"number": 7})
    trace = recorder.trace()
    assert trace.reward == 1.25
    assert [tool["function"]["name"] for tool in trace.tools] == ["look", "say"]
    # What the last call gave nobody reads any more.
    assert trace.messages == (
        {"role": "user", "content": "what is the number?"},
        {"role": "assistant", "content": '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'},
        {"role": "tool", "name": "look", "content": '{"number": 7}'},
        {
            "role": "assistant",
            "content": '<tool_call>\n{"name": "say", "arguments": {"number": 7}}\n</tool_call>',
        },
    )
    save_traces(tmp_path / "traces.jsonl", [trace, trace])
    assert load_traces(tmp_path / "traces.jsonl") == [trace, trace]


async def test_a_call_that_failed_is_read_and_earns_what_it_earns(task: ToolTask) -> None:
    recorder = Recorder(task, RiddleSession())
    await recorder.begin(0)
    with pytest.raises(ToolCallError):
        await recorder.call("guess", {})
    await recorder.call("say", {"number": 7})
    trace = recorder.trace()
    assert trace.reward == 0.5
    assert [message["role"] for message in trace.messages] == ["user", "assistant", "tool", "assistant"]
    assert trace.messages[2] == {"role": "tool", "name": "guess", "content": "error: there is no such tool"}


async def test_infrastructure_failure_gives_no_trace(task: ToolTask) -> None:
    recorder = Recorder(task, RiddleSession(broken=True))
    await recorder.begin(0)
    with pytest.raises(EpisodeLostError, match="the disk is gone"):
        await recorder.call("look", {})


USER, ASSISTANT = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
CALL = {"type": "function", "function": {"name": "look", "arguments": "{}"}}


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_chats_of_other_files_are_read(tmp_path: Path, end: str) -> None:
    """Without tools and reward; with ends of lines inside of a text; with calls that are none."""
    question = {"role": "user", "content": "one\u2028two\x85"}
    messages = [question, {**ASSISTANT, "tool_calls": [], "function_call": None}]
    line = json.dumps({"messages": messages}, ensure_ascii=False)
    (tmp_path / "chats.jsonl").write_text(f"{line}{end}{end}{line}", encoding="utf-8", newline="")
    expected = Trace(tools=(), messages=(question, ASSISTANT), reward=0.0)
    assert load_traces(tmp_path / "chats.jsonl") == [expected] * 2


def chat(*messages: dict[str, Any]) -> str:
    return json.dumps({"messages": messages})


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("", "at least one trace"),
        ("{", "line 1"),
        (chat({"role": "user"}), "messages of role and content"),
        (chat(USER), "one of the assistant's"),
        (chat(ASSISTANT, USER), "begin with another's"),
        (
            chat(USER, {**ASSISTANT, "content": "half \ud83d"}),
            r"UTF-8 .*'\\ud83d' after .*bad\.jsonl, line 1",
        ),
        (chat(USER, {**ASSISTANT, "content": "", "tool_calls": [CALL]}), r"with tool_calls \(.*line 1\)"),
        (chat(USER, {**ASSISTANT, "content": None}), r"whose content is text, got None"),
    ],
)
def test_invalid_trace_is_refused(line: str, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text(line)
    with pytest.raises(ConfigError, match=complaint):
        load_traces(tmp_path / "bad.jsonl")


@pytest.mark.heavy
async def test_only_tokens_of_the_assistant_are_learned(task: ToolTask, tmp_path: Path) -> None:
    from examples.sft.tiny_policy import make_tool_policy
    from rl_bridge.data.traces import samples_of
    from rl_bridge.tokens.chat import ChatTokenizer

    trace = await record_trace(task)
    tokenizer = ChatTokenizer(make_tool_policy(tmp_path / "policy", [trace], seed=0, width=64, layers=1))
    assert tokenizer.call_style is CallStyle.HERMES
    (row,) = samples_of(trace, tokenizer, index=5)
    assert (row.trajectory, row.advantage) == (5, 1.0)
    # By hand, as the template writes it.
    look, say = (m["content"] for m in trace.messages if m["role"] == "assistant")
    assert tokenizer.decode_written(row.tokens) == (
        "<|im_start|>system\n<tool_call>\nlook()\nsay()\n</tool_call><|im_end|>\n"
        "<|im_start|>user\nwhat is the number?<|im_end|>\n"
        f"<|im_start|>assistant\n{look}<|im_end|>\n"
        '<|im_start|>user\n<tool_response>\n{"number": 7}\n</tool_response><|im_end|>\n'
        f"<|im_start|>assistant\n{say}"
    )
    learned = [token for token, own in zip(row.tokens, row.loss_mask, strict=True) if own]
    assert learned == [*tokenizer.answer(look), *tokenizer.answer(say)]
    assert learned[-1] == row.tokens[-1] == tokenizer.stop_token_ids[0]


@pytest.mark.heavy
async def test_where_a_template_opens_a_thought_an_answer_closes_it(
    task: ToolTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from examples.sft import tiny_policy
    from rl_bridge.data.traces import samples_of
    from rl_bridge.tokens.chat import ChatTokenizer

    trace = await record_trace(task)
    answering = "<|im_start|>assistant\n{% endif"
    assert answering in tiny_policy.CHAT_TEMPLATE
    thinking = tiny_policy.CHAT_TEMPLATE.replace(answering, answering.replace("{%", "<think>\n{%"))
    monkeypatch.setattr(tiny_policy, "CHAT_TEMPLATE", thinking)
    folder = tiny_policy.make_tool_policy(tmp_path / "policy", [trace], seed=0, width=64, layers=1)
    tokenizer = ChatTokenizer(folder)
    (row,) = samples_of(trace, tokenizer, index=0)
    spans = groupby(zip(row.tokens, row.loss_mask, strict=True), key=itemgetter(1))
    answers = [tokenizer.decode_written([token for token, _ in span]) for own, span in spans if own]
    expected = [m["content"] for m in trace.messages if m["role"] == "assistant"]
    assert answers == [f"\n</think>\n\n{text}" for text in expected]
    for answer, text in zip(answers, expected, strict=True):
        as_played = parse_tool_calls(answer, style=CallStyle.HERMES, in_thought=True)
        assert as_played == parse_tool_calls(text, style=CallStyle.HERMES) != []
