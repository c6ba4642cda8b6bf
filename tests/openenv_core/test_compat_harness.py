"""The released types of agents' sessions: rollouts that the caller samples, traces to train on, collected episodes."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from openenv_core.compat.harness import (
    ResourceSession,
    ResourceSessionFactory,
    ToolResult,
    VerifyResult,
)
from openenv_core.compat.harness_collect import CollectRunner, EpisodeRecord, RolloutSerializer
from openenv_core.compat.harness_rollouts import (
    HarnessRunLimits,
    MCPHarnessAdapter,
    ModelStepResult,
    TrainingTrace,
    training_sampling,
)
from openenv_core.compat.harness_sessions import (
    SessionMCPBridge,
    StepEnvSessionAdapter,
    build_harness_rollout_func,
)
from openenv_core.llm_client import LLMResponse, ToolCall
from openenv_core.tools import Tool
from openenv_core.types import StepResult


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


class Counting:
    """A client that counts to three."""

    def __init__(self) -> None:
        self.count, self.closed = 0, False

    def reset(self, **options: Any) -> StepResult[Any]:
        if options.get("seed", 0) < 0:
            raise ConnectionError("the server is gone")
        return StepResult(observation={"count": 0})

    def step(self, action: int) -> StepResult[Any]:
        self.count += action
        return StepResult(observation={"count": self.count}, reward=float(self.count), done=self.count >= 3)

    def state(self) -> dict[str, int]:
        return {"step_count": self.count}

    def close(self) -> None:
        self.closed = True


def session_of(client: Counting, tool: str = "count", **options: Any) -> StepEnvSessionAdapter:
    return StepEnvSessionAdapter(
        client,
        task="three",
        tool_specs=[Tool(name=tool, description="Counts.", input_schema={"type": "object"})],
        action_builder=lambda name, arguments: arguments["by"],
        initial_messages_builder=lambda result, task: [{"role": "user", "content": f"count to {task}"}],
        **options,
    )


def test_client_is_a_session_and_its_tools_are_steps() -> None:
    client = Counting()
    session = session_of(client)
    assert session.initial_messages() == [{"role": "user", "content": "count to three"}]
    bridge = SessionMCPBridge(session)

    def ask(method: str, **params: Any) -> Any:
        return bridge.handle_request({"jsonrpc": "2.0", "id": 1, "method": method, "params": params})

    assert [tool["name"] for tool in ask("tools/list")["result"]["tools"]] == ["count"]
    called = ask("tools/call", name="count", arguments={"by": 3})["result"]
    assert (called["data"]["observation"], called["done"], called["error"]) == ({"count": 3}, True, None)
    for params, code in (({"name": "none"}, -32601), ({"name": "reset"}, -32602), ({}, -32602)):
        assert ask("tools/call", **params)["error"]["code"] == code
    assert ask("resources/list")["error"]["message"] == "Method not found"
    outcome = session.verify([])
    assert (outcome.env_reward, outcome.done, outcome.metrics) == (3.0, True, {"step_count": 3})
    session.close()
    assert client.closed
    with pytest.raises(ValueError, match="reserved"):
        session_of(Counting(), tool="reset")
    lost = Counting()
    with pytest.raises(ConnectionError):
        session_of(lost, seed=-1)
    assert lost.closed


class CountingFactory(ResourceSessionFactory[StepEnvSessionAdapter]):
    def create(
        self, task: Any, seed: int | None = None, episode_id: str | None = None
    ) -> StepEnvSessionAdapter:
        return session_of(Counting(), seed=task)


def count_once(messages: Any, tools: Any, sampling: Any) -> ModelStepResult:
    by = 3 if len(messages) == 1 else 0
    return ModelStepResult(LLMResponse("", [ToolCall("a", "count", {"by": by})]), [1], [2], [-0.5])


def test_rollout_function_gives_the_environments_reward_and_refuses_another() -> None:
    def play(**options: Any) -> Any:
        function = build_harness_rollout_func(
            session_factory=SimpleNamespace(create=lambda task: session_of(Counting(), **options)),  # type: ignore[arg-type]
            harness_adapter=MCPHarnessAdapter(),
            model_step_builder=lambda trainer, session: count_once,
        )
        return function(["a", "b"], None)

    assert play() == {
        "prompt_ids": [[1]] * 2,
        "completion_ids": [[2]] * 2,
        "logprobs": [[-0.5]] * 2,
        "env_reward": [3.0] * 2,
        "verify_metrics": [{"step_count": 3}] * 2,
    }
    with pytest.raises(ValueError, match="must forward"):
        play(verify_builder=lambda *given: VerifyResult(env_reward=4.0))


def test_episodes_are_collected_once_and_those_that_fail_are_counted(tmp_path: Path) -> None:
    folder = RolloutSerializer(tmp_path)

    def collect(count: int, **options: Any) -> Any:
        runner = CollectRunner(
            session_factory=CountingFactory(),
            harness_adapter=MCPHarnessAdapter(),
            serializer=folder,
            tasks=[0, -1, 2],
        )
        return runner.run(model_step=count_once, num_episodes=count, **options)

    def is_kept(record: EpisodeRecord) -> bool:
        return bool(record.task == 0)

    first = collect(3, should_keep=is_kept)
    assert (first.num_collected, first.num_failed, first.num_dropped, first.avg_reward) == (1, 1, 1, 3.0)
    again = collect(3)
    assert (again.num_collected, again.num_skipped, again.num_failed) == (1, 1, 1)
    lines = [json.loads(line) for line in folder.results_path.read_text().splitlines()]
    assert [(one["episode_id"], one["task"]) for one in lines] == [("ep-000000", 0), ("ep-000002", 2)]
    assert [one["tool_name"] for one in lines[0]["tool_trace"]] == ["count"]
    with pytest.warns(RuntimeWarning, match="moved existing results"):
        assert collect(1, resume=False).num_collected == 1
    assert len(list(tmp_path.glob("results*"))) == 2
