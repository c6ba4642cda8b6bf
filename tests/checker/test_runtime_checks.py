"""Every runtime check: passed by a good environment, failed by one with the fault that it looks for."""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pydantic import ConfigDict
from subjects import Go, Here, Seen, Walk, WalkState, folder_with, look, run, walk

from openenv_core import Environment, EpisodeOverError, Observation, State
from openenv_core.checker.check import CheckLevel, checks
from openenv_core.checker.results import Status
from openenv_core.tools import (
    CallToolAction,
    CallToolObservation,
    ListToolsAction,
    ListToolsObservation,
    Tool,
    ToolError,
    ToolErrorType,
)
from servers import create_app

RUNTIME = tuple(one for one in checks() if one.level is CheckLevel.RUNTIME)
OF_TOOLS = {"tools_listed"}


def test_a_good_environment_passes(tmp_path: Path) -> None:
    with Here(walk(), folder_with(tmp_path)) as subject:
        report = run(subject, RUNTIME)
    assert {one.check: one.message for one in report.of(Status.SKIPPED)}.keys() == OF_TOOLS
    assert report.ok, report.of(Status.FAILED, Status.CRASHED)


class Misdescribed(Go):
    model_config = ConfigDict(extra="forbid", json_schema_extra={"type": "nonsense"})


def after_step(change: Callable[[Walk, Seen], Any]) -> type[Walk]:
    """A walk that changes something after each step."""

    class Changed(Walk):
        def step(self, action: Go) -> Seen:
            seen = super().step(action)
            change(self, seen)
            return seen

    return Changed


def after_reset(change: Callable[[Walk, Seen], Any]) -> type[Walk]:
    """A walk whose resets return something else, or that changes something after each."""

    class Changed(Walk):
        def reset(self, *, seed: int | None = None, episode_id: str | None = None) -> Seen:
            seen: Seen = change(self, super().reset(seed=seed, episode_id=episode_id))
            return seen

    return Changed


def seen_with(name: str, value: Any) -> type[Walk]:
    return after_step(lambda _, seen: setattr(seen, name, value))


def after_end(answer: Callable[[Walk], Seen]) -> type[Walk]:
    """A walk that answers a step after the end."""

    class Answers(Walk):
        def step(self, action: Go) -> Seen:
            try:
                return super().step(action)
            except EpisodeOverError:
                return answer(self)

    return Answers


def with_state(**values: Any) -> Callable[[Walk, Seen], Seen]:
    """Return a change that sets fields of the state."""

    def change(env: Walk, seen: Seen) -> Seen:
        env._state = env._state.model_copy(update=values)
        return seen

    return change


class OneId(Walk):
    def reset(self, *, seed: int | None = None, episode_id: str | None = None) -> Seen:
        return super().reset(seed=seed, episode_id=episode_id or "always")


SaysText = seen_with("place", "here")


class StateOfText(Walk):
    @property
    def state(self) -> WalkState:
        state = super().state
        state.place = "here"  # type: ignore[assignment]
        return state


class OneForAll(Walk):
    def reset(self, *, seed: int | None = None, episode_id: str | None = None) -> Seen:
        self._seen = super().reset(seed=seed, episode_id=episode_id)
        return self._seen

    def step(self, action: Go) -> Seen:
        vars(self._seen).update(vars(super().step(action)))
        return self._seen


class Hangs(Walk):
    BLOCKING = True

    def step(self, action: Go) -> Seen:
        time.sleep(2)
        return super().step(action)


class Endless(Walk):
    def step(self, action: Go) -> Seen:
        self._state.step_count += 1
        return Seen(place=0, reward=0.0)


@pytest.mark.parametrize(
    ("check", "app", "words"),
    [
        ("schema_valid", walk(action=Misdescribed), "nonsense"),
        ("replies_follow_schema", walk(SaysText), "'here' at $.place"),
        ("replies_follow_schema", walk(StateOfText), "'here' at $.place"),
        ("episode_ends", walk(Endless), "within 20 steps"),
        ("episodes_by_hand", walk(after_end(lambda env: env.reset())), "got done=False"),
        ("episodes_by_hand", walk(after_end(lambda _: Seen(done=True, reward=1.0))), "the reward 1.0"),
        (
            "episodes_by_hand",
            walk(after_end(lambda env: with_state(episode_id="new")(env, Seen(done=True)))),
            "got the episode 'new'",
        ),
        ("episodes_by_hand", walk(after_step(with_state(step_count=0))), "got 0"),
        ("episodes_by_hand", walk(after_reset(with_state(step_count=3))), "step_count 0"),
        ("episodes_by_hand", walk(after_reset(with_state(episode_id="own"))), "['own', 'own', 'own']"),
        ("episodes_by_hand", walk(OneId), "['always', 'always', 'ropewalk-validate']"),
        ("rewards_valid", walk(seen_with("reward", math.nan)), "got nan"),
        ("rewards_valid", walk(seen_with("reward", 7.0)), "got 7.0"),
        ("observations_serialisable", walk(after_reset(lambda *_: None)), "got NoneType"),
        ("observations_serialisable", walk(seen_with("about", object())), "expected to encode"),
        ("observations_serialisable", walk(SaysText), "expected to decode"),
        ("observations_serialisable", walk(OneForAll), "to stay as it was"),
    ],
)
def test_a_fault_is_found(check: str, app: Any, words: str, tmp_path: Path) -> None:
    result = look(check, app, folder_with(tmp_path))
    assert result.status is Status.FAILED, result
    assert words in result.message
    assert result.change


def test_a_game_that_never_rewards_is_doubtful(tmp_path: Path) -> None:
    result = look("rewards_valid", walk(seen_with("reward", None)), folder_with(tmp_path))
    assert (result.status, "null for each of" in result.message) == (Status.WARNED, True)


def test_an_action_without_a_reply_is_found(tmp_path: Path) -> None:
    result = look("valid_actions_are_survived", walk(Hangs), folder_with(tmp_path), step_timeout_s=0.2)
    assert result.status is Status.FAILED, result
    assert "RequestTimeoutError" in result.message


def test_state_shared_by_instances_is_named(tmp_path: Path) -> None:
    class Remembers(Walk):
        places: ClassVar[list[int]] = []

        def step(self, action: Go) -> Seen:
            self.places.append(1)
            seen = super().step(action)
            return seen.model_copy(update={"place": len(self.places)})

    result = look("same_seed_same_episode", walk(Remembers), folder_with(tmp_path))
    assert "episodes change the list Remembers.places, which all instances share" in result.message


def test_an_end_of_what_is_declared_endless_is_found(tmp_path: Path) -> None:
    manifest = "spec_version: 1\nname: x\nvalidation: {episodes: {endless: true, max_steps: 20}}\n"
    folder_with(tmp_path, manifest=manifest)
    assert "take validation.episodes.endless out" in look("episode_ends", walk(), tmp_path).change
    assert look("episode_ends", walk(Endless), tmp_path).status is Status.PASSED


class Bench(Environment[Any, Observation, State]):
    """An environment of tools."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    tools = ("add", "sub")
    schema: Any = {"type": "object", "properties": {"by": {"type": "integer"}}}  # noqa: RUF012 - one for all
    state = State()

    def reset(self) -> Observation:
        return Observation()

    def step(self, action: Any) -> Observation:
        if isinstance(action, ListToolsAction):
            tools = [Tool(name=name, description=name, input_schema=self.schema) for name in self.tools]
            return ListToolsObservation(tools=tools)
        if action.tool_name not in self.tools:
            return self.unknown(action)
        return CallToolObservation(tool_name=action.tool_name, result=1)

    def unknown(self, action: CallToolAction) -> Observation:
        error = ToolError(error_type=ToolErrorType.TOOL_NOT_FOUND, message="no such tool")
        return CallToolObservation(tool_name=action.tool_name, error=error)


def bench(env: Any = Bench, **fields: Any) -> Any:
    env = type("Changed", (env,), fields)
    return create_app(env, ListToolsAction | CallToolAction, Observation, max_concurrent_envs=8)


@pytest.mark.parametrize(
    ("check", "app", "words"),
    [
        ("tools_listed", bench(tools=("add", "reset")), "got reset"),
        ("tools_listed", bench(tools=("add", "add")), "got add"),
        ("tools_listed", bench(schema={"type": "nonsense"}), "nonsense"),
    ],
)
def test_a_fault_of_tools_is_found(check: str, app: Any, words: str) -> None:
    result = look(check, app)
    assert result.status is Status.FAILED, result
    assert words in result.message


def test_good_tools_pass(tmp_path: Path) -> None:
    for check in OF_TOOLS:
        assert look(check, bench()).status is Status.PASSED
    manifest = "spec_version: 1\nname: x\nvalidation: {capabilities: {declared_tools: [add]}}\n"
    result = look("tools_listed", bench(), folder_with(tmp_path, manifest=manifest))
    assert "got add, sub" in result.message


def test_tools_are_played_with_arguments_of_their_schemas() -> None:
    with Here(bench()) as subject:
        actions = subject.actions(0)
        drawn = [next(actions) for _ in range(30)]
    assert {action["tool_name"] for action in drawn} == {"add", "sub"}
    assert any(isinstance(action["arguments"].get("by"), int) for action in drawn)


def test_an_environment_that_refuses_every_action_is_a_finding() -> None:
    class Refuses(Walk):
        def step(self, action: Go) -> Seen:
            raise ValueError("never")

    result = look("episode_ends", walk(Refuses))
    assert result.status is Status.FAILED
    assert "25 refusals in a row" in result.message
    assert "example_actions" in result.change


def test_a_constructor_that_raises_fails_every_check_and_crashes_none() -> None:
    def unbuildable() -> Walk:
        raise RuntimeError("no engine")

    with Here(walk(unbuildable)) as subject:
        report = run(subject, [one for one in RUNTIME if one.name not in OF_TOOLS])
    assert not report.of(Status.CRASHED), report.of(Status.CRASHED)
    assert "no engine" in {one.check: one for one in report.results}["rewards_valid"].message


def test_undeclared_properties_are_not_checked() -> None:
    class MoreState(Walk):
        @property
        def state(self) -> WalkState:
            return WalkState.model_validate({**super().state.model_dump(), "more": 1})

    assert look("replies_follow_schema", walk(MoreState)).status is Status.PASSED
    assert look("rewards_valid", walk(seen_with("reward", 7.0))).status is Status.PASSED
