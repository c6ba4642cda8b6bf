"""How an episode ended, and whether the policy or the infrastructure failed: marks in observations, and their readers.

A policy that is punished because a machine failed learns noise, and one that is rewarded for it learns to break
machines. So environments mark the difference, and trainers check it before they score.

Environments set fields of `Observation`, or keys of its metadata, which released environments may set too:

- `metadata["infrastructure_error"] = "reason"`: something other than the policy failed. The step, and so the episode,
  must not be scored: the trainer replays it on another server or drops it.
- `metadata["unscored"] = "reason"` on an observation whose reward is None: the episode cannot be scored, for example
  because a judge timed out. The trainer leaves it out of the baseline and the loss; its reward is not 0. A server
  repeats the mark, without a reward, up to the end of the episode.
- `metadata["truncated"] = True` on a final observation: the episode was cut off by a limit. It did not terminate,
  unless `metadata["terminated"] = True` is set as well. A final observation with neither key has terminated.

The first two also follow from two values that an observation may carry, as fields or in its metadata:

- an execution of `openenv_core.sandbox` (the observation's own fields, or `metadata["execution"]`): the status
  `sandbox_error` is an infrastructure error.
- a `verdict` with a `reason` and a textual `detail`: the reason `sandbox_error` is an infrastructure error; any other
  reason, on a final observation (`done`) without a reward, means unscored.

A reward that is NaN, infinite or beyond the range of floats also makes its episode unscored, and so does such a score
in `metadata["rubric"]`: JSON has none of them, so servers send no reward and the mark.

Only the environment's own code may write these marks: a policy that can write them will.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from pydantic import BaseModel

INFRASTRUCTURE_ERROR: Final = "infrastructure_error"
"""Metadata key: what failed other than the policy."""

UNSCORED: Final = "unscored"
"""Metadata key: why the episode has no score."""

SCORES: Final = "rubric"
"""Metadata key of the scores of a rubric's parts, by path."""

TRUNCATED: Final = "truncated"
"""Metadata key of a final observation: the episode was cut off."""

TERMINATED: Final = "terminated"
"""Metadata key of a truncated observation: the episode also reached an end of its own."""

_MAX_CACHED: Final = 1024

SANDBOX_ERROR: Final = "sandbox_error"
"""Status of an execution whose interpreter failed, and reason of a verdict that failed because of it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a step left its episode.

    Attributes:
        terminated: The episode reached an end of its own.
        truncated: The episode was cut off, for example by a step or time limit.
        infrastructure_error: What failed other than the policy, so that the episode must not be scored; None if nothing
            failed.
        unscored: Why the episode cannot be scored, so that none of its rewards count; None if the step does not say so.
    """

    terminated: bool = False
    truncated: bool = False
    infrastructure_error: str | None = None
    unscored: str | None = None

    @property
    def done(self) -> bool:
        """Whether the episode is over."""
        return self.terminated or self.truncated


def outcome_of(result: object) -> Outcome:
    """Return how a step left its episode.

    Args:
        result: An observation as a model or dict, the fields of a `StepResult`, or a payload from the wire with the key
            "observation".
    """
    done = _field(result, "done") is True
    truncated = done and _has_mark(result, TRUNCATED)
    return Outcome(
        terminated=done and (not truncated or _has_mark(result, TERMINATED)),
        truncated=truncated,
        infrastructure_error=infrastructure_failure(result),
        unscored=unscored_reason(result),
    )


def infrastructure_failure(observation: object) -> str | None:
    """Return what failed other than the policy; None if nothing failed. `observation`: see `outcome_of`."""
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
    """Return why an episode cannot be scored, as far as an observation says; None if it does not say so.

    A final observation with neither a reward nor a reason does not count as unscored: many environments leave the
    reward of a step that earned nothing at None.
    """
    parts = list(_observation_and_result(result))
    # The outermost object decides: on the wire the reward is next to the observation, which may lack its own.
    done, reward = _field(parts[0], "done") is True, _field(parts[0], "reward")
    if reward is not None and (fault := _fault_of_number(reward)):
        return f"the reward is {fault}"
    for source in parts:
        metadata = _field(source, "metadata")
        scores = _field(metadata, SCORES)
        for path, score in scores.items() if isinstance(scores, Mapping) else ():
            if fault := _fault_of_number(score):
                return f"the score of {path} is {fault}"
        if reward is not None:
            continue
        for mark in (_field(metadata, UNSCORED), _field(source, UNSCORED)):
            # Before the end, an environment's own field of this name may mean something else.
            if (done or isinstance(mark, str)) and (text := _one_line(mark, "nobody said why")):
                return text
        for verdict in _verdicts(source) if done else ():
            if text := _one_line(_field(verdict, "reason"), ""):
                return _one_line(_field(verdict, "detail"), "") or text
    return None


def is_plain(observation: Any) -> bool:
    """Whether an `Observation` has at a glance nothing for `unscored_reason` to find."""
    metadata, reward = observation.metadata, observation.reward
    if SCORES in metadata:
        return False
    if reward is not None:
        return type(reward) is float and math.isfinite(reward)
    is_marked = observation.done or observation.unscored or UNSCORED in metadata
    return not (is_marked or "observation" in vars(observation))


def _fault_of_number(number: Any) -> str:
    """Return what is wrong with a reward or score, such as "nan"; "" for a finite number, and for what is none."""
    try:
        return "" if math.isfinite(number) else str(float(number))
    except OverflowError:
        return "an integer beyond the range of floats"
    except TypeError:
        return ""


def _has_mark(result: object, mark: str) -> bool:
    """Whether the result of a finished episode has a mark, or a field of that name."""
    for source in _observation_and_result(result):
        # Ignore a value that a model derived from its other fields, which may have changed since.
        fields_set = getattr(source, "model_fields_set", (mark,))
        if (mark in fields_set and _field(source, mark) is True) or _field(
            _field(source, "metadata"), mark
        ) is True:
            return True
    return False


def _observation_and_result(observation: object) -> Iterator[object]:
    """Yield the objects that may carry fields and metadata: the argument, and the observation in it."""
    yield observation
    if (inner := _field(observation, "observation")) is not None:
        yield inner


def _verdicts(source: object) -> tuple[object, object]:
    return _field(source, "verdict"), _field(_field(source, "metadata"), "verdict")


def _field(holder: object, name: str) -> Any:
    if holder is None:
        return None
    if type(holder) is dict:  # first, for speed: the check of an abstract class is slow
        return holder.get(name)
    cls: Any = type(holder)
    if _lacks(cls, name):
        return None
    return holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)


@lru_cache(maxsize=_MAX_CACHED)
def _lacks(cls: type, name: str) -> bool:
    """Whether no model of this class has an attribute: pydantic takes long to say so of each."""
    return (
        issubclass(cls, BaseModel)
        and not issubclass(cls, Mapping)
        and cls.model_config.get("extra") != "allow"
        and cls.__getattr__ is BaseModel.__getattr__  # type: ignore[attr-defined]  # at run time
        and name not in cls.model_fields
        and not hasattr(cls, name)
    )


def _one_line(mark: object, default: str) -> str:
    """Return a mark's text, stripped; "" if it is not set, `default` if it is only True."""
    if mark is True:
        return default
    return str(mark).strip() if mark else ""
