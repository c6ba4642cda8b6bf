"""The released types by which a trainer drives an agent in a session, or takes the tokens that an agent has sampled.

They are what TRL's AsyncGRPO worker for such sessions imports.
"""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol, Self, TypedDict, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field, model_validator

from openenv_core.compat.harness import Message, ResourceSession, ToolResult
from openenv_core.llm_client import LLMResponse
from openenv_core.tools import Tool

FULL_SAMPLING: Final[Mapping[str, float]] = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""Settings with which every token is sampled from the whole distribution."""


@dataclass
class ToolTraceEntry:
    """A tool call that was made."""

    tool_name: str
    arguments: dict[str, Any]
    result: ToolResult


@dataclass
class ModelStepResult:
    """A model's answer, with the prompt's tokens, its own, and their log-probabilities, if known."""

    response: LLMResponse
    prompt_ids: list[int] = field(default_factory=list)
    completion_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


@dataclass
class RolloutEvent:
    """Something that happened in a rollout."""

    type: str
    payload: dict[str, Any] = field(default_factory=dict)


@dataclass
class HarnessRolloutResult:
    """A rollout: the chat, the tool calls, and the tokens of all answers, one after the other."""

    messages: list[Message] = field(default_factory=list)
    tool_trace: list[ToolTraceEntry] = field(default_factory=list)
    events: list[RolloutEvent] = field(default_factory=list)
    done: bool = False
    metrics: dict[str, Any] = field(default_factory=dict)
    prompt_ids: list[int] = field(default_factory=list)
    completion_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


@dataclass
class HarnessRunLimits:
    """Limits of a rollout; None is no limit."""

    max_turns: int = 10
    max_tool_calls_per_turn: int | None = None
    max_total_tool_calls: int | None = None
    sampling: dict[str, Any] = field(default_factory=dict)


class ModelStep(Protocol):
    """Samples the next answer."""

    def __call__(
        self, messages: list[Message], tools: list[Tool], sampling: dict[str, Any]
    ) -> ModelStepResult:
        """Answer a chat."""
        ...


class HarnessAdapter(ABC):
    """Drives an agent through a session."""

    @abstractmethod
    def run_white_box(
        self, model_step: ModelStep, session: ResourceSession, limits: HarnessRunLimits | None = None
    ) -> HarnessRolloutResult:
        """Run a rollout whose answers the caller samples."""

    @abstractmethod
    def run_black_box(
        self, session: ResourceSession, limits: HarnessRunLimits | None = None
    ) -> HarnessRolloutResult:
        """Run a rollout whose answers the agent gets by itself."""


class MCPHarnessAdapter(HarnessAdapter):
    """The plain loop: answers, and the calls in them, until an answer calls nothing or the session is done."""

    def run_white_box(
        self, model_step: ModelStep, session: ResourceSession, limits: HarnessRunLimits | None = None
    ) -> HarnessRolloutResult:
        """See `HarnessAdapter.run_white_box`. `metrics` has `turns`, `tool_calls` and, after a limit, `truncated`."""
        limits = limits or HarnessRunLimits()
        messages, tools = list(session.initial_messages()), session.list_tools()
        result = HarnessRolloutResult(messages=messages)
        turns = 0
        while turns < limits.max_turns and not result.done:
            step = model_step(messages, tools, dict(limits.sampling))
            calls = [
                {"id": one.id, "name": one.name, "arguments": dict(one.args)}
                for one in step.response.tool_calls
            ]
            payload = {"turn": turns, "content": step.response.content, "tool_calls": calls}
            result.events.append(RolloutEvent("model_response", payload))
            turns += 1
            messages.append(step.response.to_message_dict())
            result.prompt_ids += step.prompt_ids
            result.completion_ids += step.completion_ids
            result.logprobs += step.logprobs
            result.done = not step.response.tool_calls
            for call in step.response.tool_calls[: limits.max_tool_calls_per_turn]:
                if len(result.tool_trace) == limits.max_total_tool_calls:
                    return self._measured(result, turns, truncated=True)
                called = session.call_tool(call.name, dict(call.args))
                result.tool_trace.append(ToolTraceEntry(call.name, dict(call.args), called))
                made = {"tool_name": call.name, "arguments": dict(call.args), "done": called.done}
                result.events.append(RolloutEvent("tool_call", made))
                content = _to_text(called.data)
                messages.append(
                    {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": content}
                )
                if called.done:
                    result.done = True
                    break
        return self._measured(result, turns)

    @staticmethod
    def _measured(result: HarnessRolloutResult, turns: int, **more: Any) -> HarnessRolloutResult:
        result.metrics |= {"turns": turns, "tool_calls": len(result.tool_trace), **more}
        return result

    def run_black_box(
        self, session: ResourceSession, limits: HarnessRunLimits | None = None
    ) -> HarnessRolloutResult:
        """Raise NotImplementedError: this loop has no model of its own."""
        raise NotImplementedError("MCPHarnessAdapter asks its caller for each answer; use run_white_box")


def _to_text(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, sort_keys=True, default=str)


class TraceEntry(TypedDict, total=False):
    """A call that an agent made of its model.

    `loss_mask` has 1 for each token to be trained, of the prompt and the answer together. `reward` is None if unscored.
    """

    request: dict[str, Any]
    response: dict[str, Any]
    prompt_token_ids: list[int]
    completion_token_ids: list[int]
    completion_tokens: list[str]
    per_token_logps: list[float]
    loss_mask: list[int]
    reward: float | None
    metadata: dict[str, Any]


class TrainingTurn(BaseModel):
    """A call whose tokens can be trained on; ValueError if they do not fit each other."""

    model_config = ConfigDict(strict=True, extra="forbid")

    node_id: str = Field(min_length=1)
    prompt_token_ids: list[int]
    completion_token_ids: list[int]
    per_token_logps: list[float]
    loss_mask: list[int]
    request: dict[str, Any] = Field(default_factory=dict)
    response: dict[str, Any] = Field(default_factory=dict)
    metadata: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> Self:
        prompt, answer = len(self.prompt_token_ids), len(self.completion_token_ids)
        if not prompt or not answer or min(*self.prompt_token_ids, *self.completion_token_ids) < 0:
            raise ValueError(f"expected token ids of a prompt and an answer, got {prompt} and {answer}")
        if len(self.per_token_logps) != answer or not all(
            math.isfinite(value) and value <= 0 for value in self.per_token_logps
        ):
            raise ValueError(f"expected a log-probability of each of {answer} tokens of the answer")
        if len(self.loss_mask) != prompt + answer or not {*self.loss_mask} <= {0, 1}:
            raise ValueError(f"expected a loss mask of 0 and 1 for {prompt + answer} tokens")
        if any(self.loss_mask[:prompt]):
            raise ValueError("expected a loss mask without tokens of the prompt")
        return self


class TrainingTrace(BaseModel):
    """The calls of an agent that a trainer gets."""

    model_config = ConfigDict(strict=True, extra="forbid")

    schema_version: Literal[1] = 1
    turns: list[TrainingTurn]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len({turn.node_id for turn in self.turns}) < len(self.turns):
            raise ValueError("expected each node_id once in a training trace")
        return self

    @classmethod
    def from_entries(cls, entries: Sequence[Mapping[str, Any]]) -> Self:
        """Make a trace of entries, whose `metadata` has the `node_id`; ValueError or KeyError if one does not fit."""
        names = set(TrainingTurn.model_fields) - {"node_id"}
        return cls(
            turns=[
                TrainingTurn(
                    node_id=entry["metadata"]["node_id"],
                    **{name: value for name, value in entry.items() if name in names},
                )
                for entry in entries
            ]
        )

    def to_trace_entries(self) -> list[dict[str, Any]]:
        """Return the calls as entries."""
        return [
            turn.model_dump(exclude={"node_id"}) | {"metadata": {**turn.metadata, "node_id": turn.node_id}}
            for turn in self.turns
        ]


class _RunningSession(Protocol):
    def wait_for_completion(self, timeout_s: float | None = ...) -> int:
        """Wait for the agent's end; returns its exit code, or raises TimeoutError."""
        ...


@runtime_checkable
class LoopOwningSession(_RunningSession, Protocol):
    """A session whose agent runs by itself."""

    def fetch_proxy_trace(self) -> list[TraceEntry]:
        """Return its calls."""
        ...


@runtime_checkable
class TrainableSession(_RunningSession, Protocol):
    """A session whose agent runs by itself, and whose calls can be trained on."""

    def fetch_training_trace(self) -> TrainingTrace:
        """Return its calls."""
        ...


def training_sampling(sampling: Mapping[str, Any] | None) -> dict[str, float]:
    """Return settings with which answers can be trained on; ValueError if some tokens could not be sampled."""
    if sampling is None:
        return {}
    temperature = sampling.get("temperature")
    if (
        isinstance(temperature, bool)
        or not isinstance(temperature, int | float)
        or not 0 < temperature < math.inf
    ):
        raise ValueError(f"expected a temperature above 0, got {temperature!r}")
    for name, value in sampling.items():
        if name == "temperature" or (name == "top_k" and value == 0):
            continue
        if name not in FULL_SAMPLING or isinstance(value, bool) or value != FULL_SAMPLING[name]:
            wanted = f"{name}={FULL_SAMPLING[name]}" if name in FULL_SAMPLING else f"no {name}"
            raise ValueError(f"expected {wanted} for training, got {value!r}")
    return {"temperature": float(temperature), **FULL_SAMPLING}
