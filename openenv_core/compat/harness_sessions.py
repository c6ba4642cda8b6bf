"""The released roads of an agent through an environment: a client as a session, a session over MCP, a rollout function.

Rewards are the environment's own: `verify` of a session may pass one on, and never makes another.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass
from functools import partial
from typing import Any, Final

from openenv_core.compat.harness import (
    Message,
    ResourceSession,
    ResourceSessionFactory,
    ToolResult,
    VerifyResult,
)
from openenv_core.compat.harness_rollouts import (
    HarnessAdapter,
    HarnessRolloutResult,
    HarnessRunLimits,
    ModelStep,
)
from openenv_core.compat.types import JsonRpcErrorCode, JsonRpcResponse
from openenv_core.tools import RESERVED_TOOL_NAMES, Tool
from openenv_core.types import StepResult

_REWARD_TOLERANCE: Final = 1e-6


@dataclass(eq=False)
class StepEnvSessionAdapter(ResourceSession):
    """A client of `reset`, `step` and `state` as a session, whose tools are actions. It is reset at once.

    Args:
        client: The client; one with `sync` is used through what that returns.
        task: Passed to `initial_messages_builder`.
        seed: Of the reset.
        episode_id: Of the reset.
        tool_specs: The tools.
        action_builder: Makes the action of a tool's name and arguments.
        initial_messages_builder: Makes the first messages of the reset's result and the task.
        tool_result_builder: Makes a tool's result of name, arguments, the step's result and the state.
        verify_builder: Makes the outcome of transcript, final state, the last step's result and the state.
        reset_kwargs: Further options of the reset.

    Raises:
        ValueError: A tool has the name of an orchestration's call.
    """

    client: Any
    _: KW_ONLY
    task: Any = None
    seed: int | None = None
    episode_id: str | None = None
    tool_specs: list[Tool]
    action_builder: Callable[[str, dict[str, Any]], Any]
    initial_messages_builder: Callable[[StepResult[Any], Any], list[Message]]
    tool_result_builder: Callable[..., ToolResult] | None = None
    verify_builder: Callable[..., VerifyResult] | None = None
    reset_kwargs: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if callable(getattr(self.client, "sync", None)):
            self.client = self.client.sync()
        self._tools = {tool.name: tool for tool in self.tool_specs}
        if reserved := sorted(self._tools.keys() & RESERVED_TOOL_NAMES):
            raise ValueError(f"tool names are reserved for orchestration controls: {', '.join(reserved)}")
        self._open = True
        self._last: StepResult[Any] | None = None
        given = {"seed": self.seed, "episode_id": self.episode_id}
        options = {name: value for name, value in given.items() if value is not None}
        try:
            self._first: StepResult[Any] = self.client.reset(**options | (self.reset_kwargs or {}))
            self._state = self._read_state()
        except Exception:
            self.close()
            raise

    def _read_state(self) -> Any:
        state = getattr(self.client, "state", None)
        return state() if callable(state) else None

    def initial_messages(self) -> list[Message]:
        """See `ResourceSession.initial_messages`."""
        return list(self.initial_messages_builder(self._first, self.task))

    def list_tools(self) -> list[Tool]:
        """See `ResourceSession.list_tools`."""
        return list(self._tools.values())

    def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Step the environment; KeyError if there is no such tool."""
        if name not in self._tools:
            what = "Reserved orchestration tool" if name in RESERVED_TOOL_NAMES else "Unknown tool"
            raise KeyError(f"{what}: {name}")
        self._last = self.client.step(self.action_builder(name, dict(arguments)))
        self._state = self._read_state()
        build = self.tool_result_builder or _make_tool_result
        return build(name, dict(arguments), self._last, self._state)

    def verify(self, transcript: Sequence[Message], final_state: Any | None = None) -> VerifyResult:
        """See `ResourceSession.verify`."""
        build = self.verify_builder or _make_outcome
        return build(list(transcript), final_state, self._last, self._state)

    def close(self) -> None:
        """Close the client, once."""
        if self._open and callable(getattr(self.client, "close", None)):
            self.client.close()
        self._open = False


def _to_data(state: Any) -> Any:
    return state.model_dump() if hasattr(state, "model_dump") else state


def _make_tool_result(
    name: str, arguments: dict[str, Any], result: StepResult[Any], state: Any
) -> ToolResult:
    seen = {"observation": result.observation, "reward": result.reward, "done": result.done}
    return ToolResult(
        data={"tool_name": name, "arguments": arguments, **seen},
        done=bool(result.done),
        metadata={"reward": result.reward, "state": _to_data(state)},
    )


def _make_outcome(
    transcript: list[Message], final_state: Any, last: StepResult[Any] | None, state: Any
) -> VerifyResult:
    data = _to_data(state)
    counted = isinstance(data, Mapping) and "step_count" in data
    return VerifyResult(
        env_reward=None if last is None else last.reward,
        done=last is not None and bool(last.done),
        metrics={"step_count": data["step_count"]} if counted else {},
        artifacts={"final_state": data, "transcript_length": len(transcript)},
    )


@dataclass(eq=False)
class SessionMCPBridge:
    """A session's tools as JSON-RPC requests of MCP, in this process."""

    session: ResourceSession

    def handle_request(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the response to a `tools/list` or `tools/call`."""
        number, params = request.get("id"), request.get("params") or {}
        refuse = partial(JsonRpcResponse.error_response, request_id=number)
        if request.get("jsonrpc") != "2.0":
            response = refuse(JsonRpcErrorCode.INVALID_REQUEST)
        elif request.get("method") == "tools/list":
            tools = [
                {"name": tool.name, "description": tool.description, "inputSchema": tool.input_schema}
                for tool in self.session.list_tools()
            ]
            response = JsonRpcResponse.success({"tools": tools}, request_id=number)
        elif request.get("method") != "tools/call":
            response = refuse(JsonRpcErrorCode.METHOD_NOT_FOUND)
        elif "name" not in params:
            response = refuse(JsonRpcErrorCode.INVALID_PARAMS, message="Missing tool name")
        elif (name := params["name"]) in RESERVED_TOOL_NAMES:
            response = refuse(JsonRpcErrorCode.INVALID_PARAMS, message=f"Reserved orchestration tool: {name}")
        else:
            try:
                result = self.session.call_tool(name, dict(params.get("arguments", {})))
                response = JsonRpcResponse.success(asdict(result), request_id=number)
            except KeyError as error:
                response = refuse(JsonRpcErrorCode.METHOD_NOT_FOUND, message=str(error.args[0]))
            except ValueError as error:
                response = refuse(JsonRpcErrorCode.INVALID_PARAMS, message=str(error))
            except Exception as error:
                response = refuse(JsonRpcErrorCode.INTERNAL_ERROR, message=str(error))
        return response.model_dump()


@dataclass(eq=False)
class CLIHarnessAdapter(HarnessAdapter):
    """Runs agents whose answers it does not sample.

    Args:
        runner: Runs one: takes the session as a bridge, the session and the limits.
    """

    runner: Callable[[SessionMCPBridge, ResourceSession, HarnessRunLimits], HarnessRolloutResult]

    def run_white_box(
        self, model_step: ModelStep, session: ResourceSession, limits: HarnessRunLimits | None = None
    ) -> HarnessRolloutResult:
        """Raise NotImplementedError: the agent asks its own model."""
        raise NotImplementedError("CLIHarnessAdapter only supports black-box evaluation rollouts")

    def run_black_box(
        self, session: ResourceSession, limits: HarnessRunLimits | None = None
    ) -> HarnessRolloutResult:
        """See `HarnessAdapter.run_black_box`."""
        return self.runner(SessionMCPBridge(session), session, limits or HarnessRunLimits())


def resolve_reward(rollout: HarnessRolloutResult, outcome: VerifyResult) -> float:
    """Return the environment's reward of a rollout: of its last tool result that has one, else the outcome's.

    Raises:
        ValueError: There is none, or the two differ.
    """
    traced = None
    for entry in reversed(rollout.tool_trace):
        data = entry.result.data if isinstance(entry.result.data, Mapping) else {}
        traced = entry.result.metadata.get("reward", data.get("reward"))
        if traced is not None:
            break
    rewards = [float(reward) for reward in (traced, outcome.env_reward) if reward is not None]
    if not rewards:
        raise ValueError("rollout did not produce an environment reward")
    if not math.isclose(rewards[0], rewards[-1], rel_tol=1e-9, abs_tol=_REWARD_TOLERANCE):
        raise ValueError("verify.env_reward must forward the environment reward from the rollout")
    return rewards[0]


def run_verified(
    adapter: HarnessAdapter, model_step: ModelStep, session: ResourceSession, limits: HarnessRunLimits | None
) -> tuple[HarnessRolloutResult, VerifyResult]:
    """Run a rollout in a session, and have the session verify it."""
    rollout = adapter.run_white_box(model_step=model_step, session=session, limits=limits)
    final = {name: value for name, value in asdict(rollout).items() if name in _FINAL_STATE}
    return rollout, session.verify(transcript=rollout.messages, final_state=final)


_FINAL_STATE: Final = ("done", "metrics", "events", "tool_trace")


def build_harness_rollout_func(
    *,
    session_factory: ResourceSessionFactory[Any],
    harness_adapter: HarnessAdapter,
    model_step_builder: Callable[[Any, ResourceSession], ModelStep],
    limits: HarnessRunLimits | None = None,
    reward_key: str = "env_reward",
) -> Callable[[list[Any], Any], dict[str, list[Any]]]:
    """Return TRL's `rollout_func`: each prompt is the task of a session, in which a rollout is run and verified."""

    def rollout_func(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        names = ("prompt_ids", "completion_ids", "logprobs", reward_key, "verify_metrics")
        columns: dict[str, list[Any]] = {name: [] for name in names}
        for prompt in prompts:
            session = session_factory.create(task=prompt)
            try:
                model_step = model_step_builder(trainer, session)
                rollout, outcome = run_verified(harness_adapter, model_step, session, limits)
                tokens = (rollout.prompt_ids, rollout.completion_ids, rollout.logprobs)
                row = (*tokens, resolve_reward(rollout, outcome), dict(outcome.metrics))
            finally:
                session.close()
            for name, value in zip(names, row, strict=True):
                columns[name].append(value)
        return columns

    return rollout_func
