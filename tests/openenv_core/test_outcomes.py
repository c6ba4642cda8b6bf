"""How an episode ended and who failed, read from models, dicts, results and payloads alike."""

import math
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import from_json

from openenv_core import (
    Observation,
    Outcome,
    StepResult,
    infrastructure_failure,
    is_infrastructure_failure,
    outcome_of,
    unscored_reason,
)
from openenv_core.outcomes import INFRASTRUCTURE_ERROR, SANDBOX_ERROR, SCORES, UNSCORED
from openenv_core.protocol.batch import ends_of
from openenv_core.protocol.frames import encode_http_result, encode_observation
from openenv_core.sandbox import Execution, Status
from openenv_core.types import ResetResult


class Run(Observation):
    status: str = "ok"
    reason: str | None = None
    verdict: dict[str, Any] | None = None


def forms(**fields: Any) -> list[object]:
    """One observation as everything that a trainer may hold of it."""
    model = Run(**fields)
    as_dict = model.model_dump()
    bare = {name: value for name, value in as_dict.items() if name not in ("done", "reward")}
    metadata = model.metadata or None
    return [
        model,
        as_dict,
        StepResult(model, model.reward, model.done, metadata),
        StepResult(as_dict, model.reward, model.done, metadata),
        StepResult(bare, model.reward, model.done, None),
        {"observation": bare, "reward": model.reward, "done": model.done},
    ]


SANDBOX = {"status": "sandbox_error", "reason": "the zygote is gone"}


def test_infrastructure_failure_is_read_from_every_form() -> None:
    for fields, reason in (
        (SANDBOX, "the zygote is gone"),
        ({"status": "sandbox_error"}, "the sandbox failed"),
        ({"metadata": {"execution": SANDBOX}}, "the zygote is gone"),
        ({"metadata": {"execution": {"status": "sandbox_error", "reason": None}}}, "the sandbox failed"),
        ({"metadata": {INFRASTRUCTURE_ERROR: " no GPU is left \n"}}, "no GPU is left"),
        ({"verdict": {"reason": "sandbox_error", "detail": "no python"}, "done": True}, "no python"),
        ({"metadata": {"verdict": {"reason": "sandbox_error"}}, "reward": 0.0}, "the sandbox failed"),
        ({"metadata": {INFRASTRUCTURE_ERROR: True}}, "the environment did not say what"),
        ({"metadata": {INFRASTRUCTURE_ERROR: "a reset"}, "reward": 1.0, "done": True}, "a reset"),
    ):
        for form in forms(**fields):
            assert infrastructure_failure(form) == reason, form
            assert is_infrastructure_failure(form)
    failed = Execution(status="sandbox_error", reason="the zygote is gone", exit_code=-1)
    assert infrastructure_failure(failed) == "the zygote is gone"
    assert infrastructure_failure(replace(failed, status="killed")) is None


def test_failures_of_the_policy_are_not_infrastructure_failures() -> None:
    own: list[dict[str, Any]] = [
        {},
        {"reward": -1.0, "done": True},
        {"metadata": {INFRASTRUCTURE_ERROR: None}},
        {"metadata": {INFRASTRUCTURE_ERROR: ""}},
        {"metadata": {INFRASTRUCTURE_ERROR: False}},
        {"metadata": {UNSCORED: "the judge took too long"}, "done": True},
        {"metadata": {"execution": None}},
        {"metadata": {"execution": "sandbox_error"}},
        {"metadata": {"last_code": "status = 'sandbox_error'"}},
        {"reason": "sandbox_error"},
        {"verdict": {"reason": "timeout", "detail": "sandbox_error"}, "done": True},
        {"verdict": {"status": "sandbox_error", "reason": "failed"}, "done": True, "reward": 0.0},
    ]
    assert SANDBOX_ERROR in get_args(Status)
    own += [{"status": status, "reason": "own"} for status in get_args(Status) if status != SANDBOX_ERROR]
    for fields in own:
        for form in forms(**fields):
            assert infrastructure_failure(form) is None, form
            assert not is_infrastructure_failure(form)
    for thing in (None, "sandbox_error", 3, [], ["sandbox_error"], {}, {"observation": "text"}):
        assert infrastructure_failure(thing) is None
        assert unscored_reason(thing) is None


def test_unscored_reason_is_read_from_every_form() -> None:
    metadata = {UNSCORED: "the judge took too long"}
    for form in forms(done=True, metadata=metadata):
        assert unscored_reason(form) == "the judge took too long", form
    judged = {"reward": None, "reason": "timeout", "detail": "case 3 took too long"}
    for form in (*forms(done=True, verdict=judged), *forms(done=True, metadata={"verdict": judged})):
        assert unscored_reason(form) == "case 3 took too long", form
    for form in forms(done=True, verdict={"reason": "timeout"}):
        assert unscored_reason(form) == "timeout"
    for fields in (
        {"done": True},
        {"done": True, "reward": 0.0, "verdict": judged},
        {"done": False, "verdict": judged},
        {"done": True, "verdict": {"reason": ""}},
        {"done": True, "reward": 0.0, "metadata": metadata},
        {"done": True, "reward": False, "metadata": metadata},
        {"done": False, "metadata": {UNSCORED: True}},
        {"done": True, "metadata": {UNSCORED: ""}},
        {"reward": 0.5, "metadata": {SCORES: {"style": 0.5, "why": "nan", "lost": None}}},
    ):
        for form in forms(**fields):
            assert unscored_reason(form) is None, form


@pytest.mark.parametrize("done", [False, True])
def test_number_that_is_not_finite_leaves_the_episode_unscored(done: bool) -> None:
    for reward, fault in (
        (math.nan, "nan"),
        (-math.inf, "-inf"),
        (np.float32("nan"), "nan"),
        (10**400, "an integer beyond the range of floats"),
    ):
        result = StepResult(Run(done=done), reward, done)
        assert (result.unscored, unscored_reason(vars(result))) == (f"the reward is {fault}",) * 2
        for form in forms(done=done, reward=0.5, metadata={SCORES: {"style": 0.5, "inner.length": reward}}):
            assert unscored_reason(form) == f"the score of inner.length is {fault}", form
    for form in forms(done=done, metadata={UNSCORED: "the judge took too long"}):
        assert unscored_reason(form) == "the judge took too long", form


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["metadata", "execution", "status", "reason", "observation", "done", "reward", "x"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(JSON)
def test_any_json_value_is_accepted(value: object) -> None:
    assert infrastructure_failure(value) is None  # none of these says the one word
    assert unscored_reason(value) is None


def sent(observation: Observation) -> Any:
    """What crosses the wire, the same on the WebSocket and over plain HTTP."""
    frame = from_json(encode_observation(observation))["data"]
    assert {"metadata": None, **frame} == from_json(encode_http_result(observation))
    return frame


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (False, False, None, None)),
        ({"done": True}, (True, False, None, None)),
        ({"done": True, "truncated": True}, (False, True, None, None)),
        ({"done": True, "truncated": True, "terminated": True}, (True, True, None, None)),
        ({"infrastructure_error": "no disk"}, (False, False, "no disk", None)),
        ({"done": True, "unscored": "no judge"}, (True, False, None, "no judge")),
        # Text that was cut off in an episode that goes on, or how much of it.
        ({"metadata": {"truncated": True}}, (False, False, None, None)),
        ({"done": True, "metadata": {"truncated": {"bytes": 3}}}, (True, False, None, None)),
    ],
)
def test_outcome_fields_cross_the_wire_in_the_metadata_only(
    fields: dict[str, Any], expected: tuple[bool, bool, str | None, str | None]
) -> None:
    metadata = fields.get("metadata") or {name: said for name, said in fields.items() if name != "done"}
    here = Observation(**fields)
    frame = sent(here)
    # Released clients refuse any field of an observation that they do not know.
    assert frame["observation"] == {"metadata": metadata}
    assert frame.get("metadata", {}) == metadata
    there = Observation(**frame["observation"], done=frame["done"], reward=frame["reward"])
    results = [
        StepResult(there, there.reward, there.done, frame.get("metadata")),
        StepResult(frame["observation"], frame["reward"], frame["done"], None),
        StepResult({}, frame["reward"], frame["done"], frame.get("metadata")),
        StepResult(here, here.reward, here.done, None),
    ]
    for one in (here, there, *results):
        assert (one.terminated, one.truncated, one.infrastructure_error, one.unscored) == expected, one
    assert sent(there) == frame
    assert Observation.model_json_schema()["properties"].keys() == {"done", "reward", "metadata"}


def test_outcome_fields_may_be_set_later_and_imply_done() -> None:
    late = Observation(done=True)
    late.truncated = True
    assert sent(late)["metadata"] == {"truncated": True}
    assert ends_of(late) == (False, True)
    assert not StepResult(late, None, True).terminated
    late.terminated = True
    assert ends_of(late) == (True, True)
    assert StepResult(late, None, True).terminated
    assert Observation(truncated=True).done
    assert Observation(terminated=True) == Observation(done=True)


def test_fields_of_the_environment_keep_their_meaning() -> None:
    class Cut(Observation):
        terminated: str = "by nobody"
        truncated: bool = False  # of a text

    going = Cut(truncated=True)
    assert sent(going)["observation"] == {"metadata": {}, "terminated": "by nobody", "truncated": True}
    assert sent(Cut(done=True))["observation"]["terminated"] == "by nobody"
    assert not StepResult(going, None, False).truncated
    # Gymnasium's word, beside `done`.
    assert StepResult({"truncated": True, "terminated": False}, 0.0, True).truncated


def test_results_unpack_as_those_of_gymnasium() -> None:
    step = StepResult(Observation(truncated=True), 1.0, True, {"truncated": True})
    observation, reward, terminated, truncated, info = step
    assert (observation, reward, terminated, truncated, info) == (
        step.observation,
        1.0,
        False,
        True,
        {"truncated": True},
    )
    assert step.outcome == outcome_of(step.observation) == Outcome(truncated=True)
    assert tuple(ResetResult(step.observation)) == (step.observation, {})
