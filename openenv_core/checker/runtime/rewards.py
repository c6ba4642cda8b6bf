"""Rewards, and what an environment returns before the wire takes it."""

import json
import math
import time
from collections.abc import Iterator
from typing import Any, Final

from pydantic import BaseModel

from openenv_core.checker.check import CheckFailed, CheckWarned, Level, NotApplicable, check
from openenv_core.checker.playing.instance import LocalEnvironment
from openenv_core.checker.playing.turns import ENOUGH_S, STEPS, played, seeds
from openenv_core.checker.subject import REFUSED_AT_MOST, Subject, refusing
from openenv_core.protocol.replies import encode_model, encode_observation
from openenv_core.types import Observation

SLACK: Final = 1e-9
"""Of a range's width: what a sum of floats may be beside it."""


@check(Level.RUNTIME)
def check_reward_finite(subject: Subject) -> str:
    """Every reward is a finite number, or none."""
    seen = steps = rewarded = 0
    for where, observation in _raw(subject):
        reward = getattr(observation, "reward", None)
        seen += 1
        steps += not where.startswith("of reset(")
        # numpy's numbers are none of Python's; what they are is found out by turning them into one.
        try:
            number = 0.0 if reward is None else float(reward)
        except (TypeError, ValueError) as error:
            raise CheckFailed(
                f"expected a number or None for the reward {where}, got {reward!r:.80}",
                change="return a float",
            ) from error
        if not math.isfinite(number):
            raise CheckFailed(
                f"expected a finite reward {where}, got {number}: it crosses the wire as null",
                change="bound what the reward is computed from: a division by 0, a logarithm of 0, an overflow",
            )
        rewarded += reward is not None
    if steps and not rewarded:
        raise CheckWarned(
            f"expected some step to be rewarded, got null for each of {steps}: nobody can learn from that",
            change="set the reward of observations; where only good play is rewarded, show some in openenv.yaml: "
            "validation.episodes.example_actions",
        )
    return f"{seen} rewards"


@check(Level.RUNTIME)
def check_reward_in_range(subject: Subject) -> str:
    """Every reward of a step lies within the range that the manifest declares."""
    declared = subject.promises.validation.reward
    if declared is None:
        raise NotApplicable("no range is declared: validation.reward.range in openenv.yaml")
    low, high = declared.range
    slack = (high - low) * SLACK
    seen: list[float] = []
    with subject.client() as client:
        for seed in seeds():
            for turn in played(subject, client, seed):
                reward = turn.result.reward
                if turn.action is None or reward is None:
                    continue
                seen.append(float(reward))
                if not low - slack <= reward <= high + slack:
                    raise CheckFailed(
                        f"expected the reward {turn.where} to lie within {low:g} to {high:g}, got {reward}",
                        change="correct the reward, or validation.reward.range in openenv.yaml; rewards are those "
                        "of one step, never a sum",
                    )
    return f"{len(seen)} rewards from {min(seen):g} to {max(seen):g}" if seen else "no step had a reward"


@check(Level.RUNTIME)
def check_observations_serialisable(subject: Subject) -> str:
    """What reset, step and state return are models that JSON can hold, and that can be read back."""
    seen = 0
    for where, observation in _raw(subject):
        seen += 1
        if not isinstance(observation, Observation):
            raise CheckFailed(
                f"expected an Observation {where}, got {type(observation).__name__}: {observation!r:.120}",
                change="return an instance of the observation model",
            )
        _round_trip(observation, where)
    return f"{seen} observations"


@check(Level.RUNTIME)
def check_observations_stay(subject: Subject) -> str:
    """An observation stays as it was while the episode goes on."""
    seen = 0
    before: tuple[str, BaseModel, bytes] | None = None
    for where, observation in _raw(subject):
        if before is not None and _text(before[1]) != before[2]:
            raise CheckFailed(
                f"expected the observation {before[0]} to stay as it was, got another one after the next call",
                change="give observations copies of what the environment goes on to change: list(self._board), "
                "array.copy(); whoever plays it without a server keeps them",
            )
        text = _text(observation)
        before = None if text is None else (where, observation, text)
        seen += 1
    return f"{seen} observations"


def _text(observation: Any) -> bytes | None:
    try:
        return encode_model(observation)
    except Exception:  # observations_serialisable tells
        return None


def _round_trip(observation: BaseModel, where: str) -> None:
    model = type(observation)
    try:
        if isinstance(observation, Observation):
            encode_observation(observation)
        text = encode_model(observation)
    except Exception as error:  # pydantic's, or that of a serialiser of the author's own
        raise CheckFailed(
            f"expected {model.__name__} {where} to go into JSON, got {type(error).__name__}: {error}",
            change="keep to what JSON has, numpy and bytes: no open files, functions, sockets or engine objects",
        ) from error
    try:
        model.model_validate(json.loads(text))
    except Exception as error:
        raise CheckFailed(
            f"expected {model.__name__} {where} to be read back from its own JSON, got {error}",
            change="give each field the type of what is put into it; assignments after construction are not "
            "checked unless validate_assignment says so",
        ) from error


def _raw(subject: Subject) -> Iterator[tuple[str, Any]]:
    """Play in this process, and yield what came as the environment returned it, with where it did."""
    for seed in seeds():
        with LocalEnvironment(subject.app.served, subject.reset_options) as environment:
            try:
                observation = environment.reset(seed=seed)
            except Exception as error:
                raise CheckFailed(
                    f"expected reset(seed={seed}) to return an observation, got {type(error).__name__}: {error}",
                    change="make reset work on a new instance, with a seed and without any other option, or give what "
                    "it needs in openenv.yaml: validation.episodes.reset_options",
                ) from error
            yield f"of reset(seed={seed})", observation
            step = refused = 0
            until = time.monotonic() + ENOUGH_S
            for action in subject.actions(seed):
                try:
                    observation = environment.step(action)
                except Exception as error:
                    refused += 1
                    if refused >= REFUSED_AT_MOST:
                        raise refusing(refused, action, error) from error
                    continue
                refused, step = 0, step + 1
                yield f"of step {step} after reset(seed={seed}), action {action!r:.120},", observation
                if getattr(observation, "done", False) or step >= STEPS or time.monotonic() > until:
                    break
