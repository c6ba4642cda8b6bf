"""The released types of agents' sessions: a rollout that the caller samples, and traces that can be trained on."""

from typing import Any

import pytest

from openenv_core.compat.harness import ResourceSession, ToolResult, VerifyResult
from openenv_core.compat.harness_rollouts import (
    HarnessRunLimits,
    MCPHarnessAdapter,
    ModelStepResult,
    TrainingTrace,
    training_sampling,
)
from openenv_core.llm_client import LLMResponse, ToolCall


class Adding(ResourceSession):
    """Adds, and is done when told so."""

    def initial_messages(self) -> list[dict[str, Any]]:
        return [{"role": "user", "content": "Add."}]

    def list_tools(self) -> list[Any]:
        return []

    def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        return ToolResult(data={"sum": sum(arguments.values())}, done=name == "finish")

    def verify(self, transcript: Any, final_state: Any = None) -> VerifyResult:
        return VerifyResult(env_reward=1.0)

    def close(self) -> None: ...


def call(name: str, **args: int) -> ToolCall:
    return ToolCall(id=f"call-{name}", name=name, args=args)


def run(*answers: list[ToolCall], **limits: Any) -> Any:
    left = list(answers)

    def sample(messages: Any, tools: Any, sampling: Any) -> ModelStepResult:
        number = len(answers) - len(left)
        return ModelStepResult(LLMResponse(f"{number}", left.pop(0)), [number], [number + 10], [-1.0])

    return MCPHarnessAdapter().run_white_box(sample, Adding(), HarnessRunLimits(**limits))


def test_loop_ends_with_an_answer_without_calls_or_with_the_session() -> None:
    result = run([call("add", a=1, b=2), call("add", a=3)], [])
    assert result.done
    assert [message["role"] for message in result.messages] == [
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
    ]
    assert result.messages[2]["content"] == '{"sum": 3}'
    assert (result.prompt_ids, result.completion_ids, result.logprobs) == ([0, 1], [10, 11], [-1.0, -1.0])
    assert result.metrics == {"turns": 2, "tool_calls": 2}
    over = run([call("finish"), call("add")])
    assert (over.done, [entry.tool_name for entry in over.tool_trace]) == (True, ["finish"])


def test_limits_end_the_loop() -> None:
    assert not run([call("add")], [call("add")], max_turns=1).done
    assert len(run([call("add"), call("add")], [], max_tool_calls_per_turn=1).tool_trace) == 1
    cut = run([call("add")], [call("add")], max_total_tool_calls=1)
    assert cut.metrics == {"truncated": True, "turns": 2, "tool_calls": 1}
    with pytest.raises(NotImplementedError, match="use run_white_box"):
        MCPHarnessAdapter().run_black_box(Adding())


ENTRY: dict[str, Any] = {
    "prompt_token_ids": [1, 2],
    "completion_token_ids": [3],
    "per_token_logps": [-0.5],
    "loss_mask": [0, 0, 1],
    "request": {"messages": []},
    "metadata": {"node_id": "a"},
}


def test_trace_comes_out_as_it_went_in_and_refuses_what_does_not_fit() -> None:
    (entry,) = TrainingTrace.from_entries([ENTRY]).to_trace_entries()
    assert entry == {**ENTRY, "response": {}}
    for wrong, message in (
        ({"loss_mask": [0, 1, 1]}, "without tokens of the prompt"),
        ({"loss_mask": [0, 1]}, "for 3 tokens"),
        ({"per_token_logps": [0.5]}, "log-probability of each of 1"),
        ({"completion_token_ids": []}, "got 2 and 0"),
    ):
        with pytest.raises(ValueError, match=message):
            TrainingTrace.from_entries([ENTRY | wrong])
    with pytest.raises(ValueError, match="each node_id once"):
        TrainingTrace.from_entries([ENTRY, ENTRY])


def test_sampling_is_of_the_whole_distribution() -> None:
    assert training_sampling(None) == {}
    assert training_sampling({"temperature": 0.5, "top_k": 0})["top_k"] == -1
    for wrong in ({"temperature": 0}, {"temperature": 1, "top_p": 0.9}, {"temperature": 1, "stop": "a"}):
        with pytest.raises(ValueError, match="expected"):
            training_sampling(wrong)
