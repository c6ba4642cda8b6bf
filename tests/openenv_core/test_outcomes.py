"""Whose fault it was: read from models, dicts, results and payloads alike."""

from dataclasses import replace
from typing import Any, get_args

from hypothesis import given
from hypothesis import strategies as st

from openenv_core import (
    Observation,
    StepResult,
    infrastructure_failure,
    is_infrastructure_failure,
    unscored_reason,
)
from openenv_core.outcomes import INFRASTRUCTURE_ERROR, SANDBOX_ERROR, UNSCORED
from openenv_core.sandbox import Execution, Status


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


def test_what_failed_is_said() -> None:
    for fields, words in (
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
            assert infrastructure_failure(form) == words, form
            assert is_infrastructure_failure(form)
    failed = Execution(status="sandbox_error", reason="the zygote is gone", exit_code=-1)
    assert infrastructure_failure(failed) == "the zygote is gone"
    assert infrastructure_failure(replace(failed, status="killed")) is None


def test_the_policys_own_doing_is_no_failure() -> None:
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


def test_why_nobody_can_say_how_well() -> None:
    told = {UNSCORED: "the judge took too long"}
    for form in forms(done=True, metadata=told):
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
        {"done": True, "reward": 0.0, "metadata": told},
        {"done": True, "reward": False, "metadata": told},
        {"done": False, "metadata": told},
        {"done": True, "metadata": {UNSCORED: ""}},
    ):
        for form in forms(**fields):
            assert unscored_reason(form) is None, form


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
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
def test_nothing_that_a_wire_carries_breaks_it(value: object) -> None:
    assert infrastructure_failure(value) is None  # none of these says the one word
    assert unscored_reason(value) is None
