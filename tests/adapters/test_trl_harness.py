"""TRL's worker for agents' sessions, as it is released, with our types in place of the released package's."""

import threading
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
from compat_hook import uninstall_hook
from missing import require

from openenv_core import compat
from openenv_core.compat.harness import ResourceSession, ToolResult, VerifyResult

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]

require("trl")

ENTRY: dict[str, Any] = {
    "prompt_token_ids": [1, 2],
    "completion_token_ids": [3, 4],
    "per_token_logps": [-0.5, -0.25],
    "loss_mask": [0, 0, 1, 1],
    "request": {"messages": [{"role": "user", "content": "Add."}]},
    "response": {"choices": [{"message": {"content": "Done."}}]},
    "metadata": {"node_id": "a"},
}


class Finishing(ResourceSession):
    def initial_messages(self) -> list[dict[str, Any]]:
        return [{"role": "user", "content": "Finish."}]

    def list_tools(self) -> list[Any]:
        return []

    def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        return ToolResult(data="done", done=True)

    def verify(self, transcript: Any, final_state: Any = None) -> VerifyResult:
        return VerifyResult(env_reward=0.75)

    def close(self) -> None: ...

    def wait_for_completion(self, timeout_s: float | None = None) -> int:
        return 0

    def fetch_training_trace(self) -> Any:
        from openenv.core.harness import TrainingTrace

        return TrainingTrace.from_entries([ENTRY])


@pytest.fixture
def trl_harness(monkeypatch: pytest.MonkeyPatch) -> Any:
    """TRL's module, and a loop of it with one session and no model server."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    compat.install()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from trl.experimental.async_grpo import openenv_harness

        loop = object.__new__(openenv_harness._HarnessRolloutLoop)
        loop._factory = SimpleNamespace(create=lambda *_, **__: Finishing())
        loop._limits = openenv_harness.HarnessRunLimits(max_turns=4)
        loop._adapter = loop._rollout_reward_fn = None
        loop._live_sessions, loop._stop_event = set(), threading.Event()
        loop._fork_threshold_tokens = 0
        yield openenv_harness, loop
    finally:
        uninstall_hook()


def test_an_agents_calls_are_its_sequences(trl_harness: Any) -> None:
    _, loop = trl_harness
    (completion, tokens, sequences, _, _, reward), metrics = loop._run_session([])
    assert (reward, tokens, metrics["turns"], len(sequences)) == (0.75, [3, 4], 1, 1)
    assert completion[-1] == {"role": "assistant", "content": "Done."}


def test_turns_that_trl_samples_drive_a_session(trl_harness: Any) -> None:
    module, loop = trl_harness
    from openenv.core.harness import MCPHarnessAdapter

    loop._adapter = MCPHarnessAdapter()

    def sample(turns: Any, times: Any, messages: Any, tools: Any, sampling: Any) -> Any:
        turns.append(module.TurnRecord([1, 2], [3], [-0.5]))
        times.append((0.0, 1.0, ["finish"]))
        response = module.LLMResponse("I finish.", [module.ToolCall(id="c", name="finish", args={})])
        return module.ModelStepResult(response, [1, 2], [3], [-0.5])

    loop._sample_turn = sample
    (completion, tokens, _, calls, failures, reward), metrics = loop._run_session([])
    assert (reward, tokens, calls, failures) == (0.75, [3], 1, 0)
    assert [message["role"] for message in completion] == ["user", "assistant", "tool"]
    assert metrics["tool_calls_by_name"] == {"finish": 1}
