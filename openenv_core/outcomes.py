"""How an episode ended, and whether the policy or the infrastructure is at fault: marks in observations, and readers.

A policy that is punished because a machine failed learns noise, and a policy that is rewarded for it learns to break
machines. So an environment tells the two apart, and a trainer asks before it scores.

What an environment says, by fields of `Observation`, or under keys of its metadata, which released environments may set
too:

- `metadata["infrastructure_error"] = "why, in words"`: something beside the policy failed. The step, and so the
  episode, is worth nothing: the trainer plays it again elsewhere, or drops it.
- `metadata["unscored"] = "why, in words"` on a last observation (`done`) whose reward is None: the episode was
  played, and nobody can say how well, a judge that ran out of time for one. The trainer leaves it out of the baseline
  and of the loss; it is not 0.

- `metadata["truncated"] = True` on a last observation: the episode was cut off by a limit. It has not come to an end of
  its own, unless `metadata["terminated"] = True` says that too. A last observation with neither has terminated.

Two things that observations may carry say the same as the first two by themselves, as fields or below the metadata:

- an execution of `openenv_core.sandbox`: its status `sandbox_error` is the first of the two. The fields may be the
  observation's own, or those of `metadata["execution"]`.
- a `verdict`, which has a `reason` and its `detail` in words: with the reason `sandbox_error` it is the first, with
  any other and without a reward the second.

Only the environment's own code may write these: what the policy can write, it will.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

INFRASTRUCTURE_ERROR: Final = "infrastructure_error"
"""The key of an observation's metadata that says what failed beside the policy."""

UNSCORED: Final = "unscored"
"""The key of an observation's metadata that says why a last observation has no reward."""

TRUNCATED: Final = "truncated"
"""The key of a last observation's metadata that says that the episode was cut off."""

TERMINATED: Final = "terminated"
"""The key of a truncated observation's metadata that says that the episode has come to its own end all the same."""

SANDBOX_ERROR: Final = "sandbox_error"
"""The status of an execution whose interpreter failed, and the reason of a verdict that came to nothing by that."""


def infrastructure_failure(observation: object) -> str | None:
    """Return what failed beside the policy, in words; None where nothing did.

    Args:
        observation: An observation, as a model or as a dict; a `StepResult` around one; or the payload of the wire,
            which has it under "observation".
    """
    for source in _observation_and_result(observation):
        metadata = _field(source, "metadata")
        for mark in (_field(metadata, INFRASTRUCTURE_ERROR), _field(source, INFRASTRUCTURE_ERROR)):
            if reason := _one_line(mark, "the environment did not say what"):
                return reason
        for execution in (source, _field(metadata, "execution")):
            if _field(execution, "status") == SANDBOX_ERROR:
                return _one_line(_field(execution, "reason"), "") or "the sandbox failed"
        for verdict in _verdicts(source):
            if _field(verdict, "reason") == SANDBOX_ERROR:
                return _one_line(_field(verdict, "detail"), "") or "the sandbox failed"
    return None


def is_infrastructure_failure(observation: object) -> bool:
    """Return whether an observation reports a failure of the infrastructure, not of the policy."""
    return infrastructure_failure(observation) is not None


def unscored_reason(result: object) -> str | None:
    """Return why an episode that has ended has no reward, in words; None where it has one or is not over.

    A last observation with neither a reward nor a reason is no such case: many environments leave the reward of a
    step that earned nothing at None.
    """
    parts = list(_observation_and_result(result))
    # The outermost knows: on the wire the reward stands beside the observation, whose own may be absent.
    if _field(parts[0], "done") is not True or _field(parts[0], "reward") is not None:
        return None
    for source in parts:
        for mark in (_field(_field(source, "metadata"), UNSCORED), _field(source, UNSCORED)):
            if text := _one_line(mark, "nobody said why"):
                return text
        for verdict in _verdicts(source):
            if reason := _one_line(_field(verdict, "reason"), ""):
                return _one_line(_field(verdict, "detail"), "") or reason
    return None


def was_truncated(result: object) -> bool:
    """Return whether an episode is over because a limit has cut it off."""
    return _has_end_mark(result, TRUNCATED)


def was_terminated(result: object) -> bool:
    """Return whether an episode terminated: it is done, and was not truncated, or is marked as both."""
    if _field(result, "done") is not True:
        return False
    return not was_truncated(result) or _has_end_mark(result, TERMINATED)


def _has_end_mark(result: object, mark: str) -> bool:
    """Whether a finished episode has a mark, or a field of its name. Truncated text is no truncated episode."""
    if _field(result, "done") is not True:
        return False
    for source in _observation_and_result(result):
        # A model fills in what follows from its other fields, which may have been set since.
        fields_set = getattr(source, "model_fields_set", (mark,))
        if (mark in fields_set and _field(source, mark) is True) or _field(
            _field(source, "metadata"), mark
        ) is True:
            return True
    return False


def _observation_and_result(observation: object) -> Iterator[object]:
    """Yield what may carry fields and metadata: the thing itself, and the observation in it."""
    yield observation
    if (inner := _field(observation, "observation")) is not None:
        yield inner


def _verdicts(source: object) -> tuple[object, object]:
    return _field(source, "verdict"), _field(_field(source, "metadata"), "verdict")


def _field(holder: object, name: str) -> Any:
    return holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)


def _one_line(mark: object, otherwise: str) -> str:
    """Return what was said as a line; "" where nothing was, `otherwise` for a mere yes."""
    if mark is True:
        return otherwise
    return str(mark).strip() if mark else ""
