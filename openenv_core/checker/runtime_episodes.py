"""How episodes begin, go on and end, and what they reward."""

import json
import math
import time
from collections.abc import Iterator
from typing import Any, Final

from pydantic import BaseModel

from openenv_core.checker.check import CheckError, CheckLevel, CheckWarnedError, NotApplicableError, check
from openenv_core.checker.playing import EPISODES, STEPS, SUFFICIENT_PLAY_S, LocalEnvironment, played, seeds
from openenv_core.checker.subject import REFUSED_AT_MOST, Client, Subject, refusing
from openenv_core.errors import ClientError, ExecutionError, RequestTimeoutError, ValidationFailedError
from openenv_core.protocol.replies import encode_model, encode_observation
from openenv_core.types import Observation, StepResult

PLAY_BUDGET_S: Final = 60.0
"""How long, in seconds, is played until an end that does not come is given up."""

ID: Final = "ropewalk-validate-1"
OTHER_ID: Final = "ropewalk-validate-2"

COMPARED: Final = 3
"""Episodes that are played with and without reads of the state."""

NOT_A_FIELD: Final = "ropewalk_no_such_field"

COUNT: Final = (
    "set step_count to 0 in reset, and add 1 in each step that is taken: "
    "self._state = State(episode_id=...), self._state.step_count += 1"
)


@check(CheckLevel.RUNTIME)
def check_episode_ends(subject: Subject) -> str:
    """An episode of valid actions comes to an end within the declared steps, or is declared endless."""
    promised = subject.promises.validation.episodes
    until = time.monotonic() + PLAY_BUDGET_S
    lengths: list[int] = []
    with subject.client() as client:
        for seed in range(EPISODES):
            steps = 0
            ended = False
            for turn in played(subject, client, seed, steps=promised.max_steps, seconds=PLAY_BUDGET_S):
                steps, ended = turn.step, bool(turn.result.done)
                if time.monotonic() > until:
                    break
            lengths.append(steps)
            if promised.endless:
                if ended:
                    raise CheckError(
                        f"expected no end, as validation.episodes.endless declares, got done after {steps} steps",
                        change="take validation.episodes.endless out of openenv.yaml",
                    )
                return f"declared endless; {steps} steps without an end"
            if ended:
                continue
            if steps < promised.max_steps:
                raise NotApplicableError(
                    f"no end was seen in the {steps} steps that {PLAY_BUDGET_S:g} s allowed; declare a lower "
                    "validation.episodes.max_steps, or example_actions that come to an end"
                )
            raise CheckError(
                f"expected done within {promised.max_steps} steps of valid actions after reset(seed={seed}), got "
                "no end",
                change="end the episode after so many steps, or say in openenv.yaml what holds: "
                "validation.episodes.max_steps, endless: true, or example_actions that come to an end",
            )
    return f"ends after {min(lengths)} to {max(lengths)} steps"


@check(CheckLevel.RUNTIME)
def check_step_after_done(subject: Subject) -> str:
    """A step after the end is refused, or answered with the end again; it begins no new episode."""
    change = (
        "begin step() with: if self._done: raise EpisodeOverError (from openenv_core); the session lives on, and the "
        "caller knows that a reset is due"
    )
    with subject.client() as client:
        _play_to_the_end(subject, client)
        before = client.state()
        action = next(subject.actions(0))
        try:
            after: StepResult[dict[str, Any]] | None = client.step(action)
        except (ExecutionError, ValidationFailedError) as error:
            after, said = None, f"refused: {error}"
        except RequestTimeoutError as error:
            raise CheckError(
                f"expected an answer to a step after the end, got {error}", change=change
            ) from error
        except ClientError as error:
            raise CheckError(
                f"expected the session to outlive a step after the end, got {type(error).__name__}: {error}",
                change=change,
            ) from error
        if after is not None:
            if not after.done:
                raise CheckError(
                    "expected a step after the end to be refused or to be done again, got an observation with "
                    "done=False: a new episode that nobody asked for",
                    change=change,
                )
            if after.reward:
                raise CheckError(
                    f"expected no further reward after the end, got {after.reward}", change=change
                )
            said = "answered with the end again"
        if (now := client.state()).get("episode_id") != before.get("episode_id"):
            raise CheckError(
                f"expected the episode to stay {before.get('episode_id')!r} after the end, "
                f"got {now.get('episode_id')!r}",
                change=change,
            )
        if subject.reset(client, seed=1).done and not _done_at_once(subject):
            raise CheckError(
                "expected reset after the end to begin an episode, got one that is done",
                change="let reset put everything back that step changes, the mark that the episode is over too",
            )
    return printable_start(said)


@check(CheckLevel.RUNTIME)
def check_state_counts_steps(subject: Subject) -> str:
    """The state's step_count is 0 after a reset and grows by one with each step."""
    seen = 0
    with subject.client() as client:
        for seed in seeds():
            for turn in played(subject, client, seed):
                seen += 1
                count = client.state().get("step_count")
                # Whether a step that failed counts is the environment's own affair.
                if not isinstance(count, int) or not turn.step <= count <= turn.step + turn.refused:
                    raise CheckError(
                        f"expected step_count {turn.step} in the state {turn.where} got {count!r}",
                        change=COUNT,
                    )
    return f"{seen} states"


@check(CheckLevel.RUNTIME)
def check_episode_id(subject: Subject) -> None:
    """The state has the episode_id that the reset was given, and one of its own for each reset without."""
    with subject.client() as client:
        for given in (ID, OTHER_ID):
            subject.reset(client, episode_id=given)
            if (got := client.state().get("episode_id")) != given:
                raise CheckError(
                    f"expected episode_id {given!r} in the state after reset(episode_id={given!r}), got {got!r}",
                    change="let reset take episode_id, and put it into the state",
                )
        drawn = []
        for _ in range(2):
            subject.reset(client)
            drawn.append(client.state().get("episode_id"))
    if None in drawn or drawn[0] == drawn[1] or ID in drawn or OTHER_ID in drawn:
        raise CheckError(
            f"expected a new episode_id after each reset without one, got {drawn[0]!r} and {drawn[1]!r}",
            change="let reset draw one: str(uuid4()) if episode_id is None else episode_id",
        )


@check(CheckLevel.RUNTIME)
def check_state_is_only_read(subject: Subject) -> str:
    """Reading the state changes nothing: neither the state nor the episode."""
    seen = 0
    change = "let the property `state` return what is known, and compute nothing that is kept"
    with subject.client() as client:
        for seed in seeds():
            for turn in played(subject, client, seed):
                first, second = client.state(), client.state()
                seen += 1
                if first != second:
                    names = sorted(key for key in {*first, *second} if first.get(key) != second.get(key))
                    raise CheckError(
                        f"expected two reads of the state {turn.where} to be the same, "
                        f"got other values of {', '.join(names)}",
                        change=change,
                    )
    _compare_with_and_without_reads(subject, change)
    return f"{seen} states read twice"


@check(CheckLevel.RUNTIME)
def check_invalid_action_refused(subject: Subject) -> None:
    """An action with an unknown key is refused with VALIDATION_ERROR, and the session and its episode live on."""
    with subject.client() as client:
        subject.reset(client, seed=0)
        before = client.state()
        valid = next(subject.actions(0))
        _refused(client, {**valid, NOT_A_FIELD: 1}, "with an unknown key")
        if (after := client.state()) != before:
            raise CheckError(
                f"expected a refused action to leave the state as it was, got {after} after {before}",
                change="leave the validation of actions to the model: it is done before step() is called",
            )
        try:
            client.step(valid)
        except (ExecutionError, ValidationFailedError):
            pass  # it may be against the environment's rules just now; the session answers
        except ClientError as error:
            raise CheckError(
                f"expected the session to live on after a refused action, got {type(error).__name__}: {error}",
                change="raise nothing but Exception in validators of the action",
            ) from error


@check(CheckLevel.RUNTIME)
def check_http_refuses_invalid_action(subject: Subject) -> None:
    """Over plain HTTP an action with an unknown key is answered with status 422."""
    valid = next(subject.actions(0))
    with subject.http() as http:
        reply = http.post("/step", json={"action": {**valid, NOT_A_FIELD: 1}})
    if reply.status_code == 404:
        raise NotApplicableError("the server has no /step")
    if reply.status_code != 422:
        raise CheckError(
            f"expected status 422 for an action with an unknown key, got {reply.status_code} {reply.text[:200]}",
            change='keep extra="forbid" on the action model, and raise ValueError alone in its validators',
        )


def printable_start(text: str) -> str:
    """Return the beginning of what a subject said."""
    return " ".join(text.split())[:120]


def _refused(client: Client, action: dict[str, Any], what: str) -> None:
    change = 'keep extra="forbid" on the action model, and raise ValueError alone in its validators'
    try:
        client.step(action)
    except ValidationFailedError:
        return
    except ClientError as error:
        raise CheckError(
            f"expected VALIDATION_ERROR for an action {what}, got {type(error).__name__}: {error}",
            change=change,
        ) from error
    raise CheckError(f"expected VALIDATION_ERROR for an action {what}, got an observation", change=change)


def _play_to_the_end(subject: Subject, client: Client) -> None:
    promised = subject.promises.validation.episodes
    if promised.endless:
        raise NotApplicableError("its episodes are declared endless")
    until = time.monotonic() + PLAY_BUDGET_S
    for turn in played(subject, client, 0, steps=promised.max_steps, seconds=PLAY_BUDGET_S):
        if turn.result.done:
            return
        if time.monotonic() > until:
            break
    raise NotApplicableError("no episode came to an end; see episode_ends")


def _done_at_once(subject: Subject) -> bool:
    """Whether episodes may be over with their reset, as a hand that is won as it is dealt."""
    with subject.client() as client:
        return bool(subject.reset(client, seed=1).done)


def _compare_with_and_without_reads(subject: Subject, change: str) -> None:
    """Hold an episode with reads against one without, where two without are the same."""

    def answers(read: bool) -> list[Any]:
        found = []
        with subject.client() as client:
            for seed in range(COMPARED):
                for turn in played(subject, client, seed, episode_id=ID):
                    if read:
                        client.state()
                    seen = {key: value for key, value in turn.result.observation.items() if key != "metadata"}
                    found.append((seen, turn.result.reward, turn.result.done, turn.step))
        return found

    plain = answers(False)
    if plain == answers(False) and plain != answers(True):
        raise CheckError(
            "expected an episode in which the state is read to go as one in which it is not, got another",
            change=change,
        )


SLACK: Final = 1e-9
"""Of a range's width: what a sum of floats may be beside it."""


@check(CheckLevel.RUNTIME)
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
            raise CheckError(
                f"expected a number or None for the reward {where}, got {reward!r:.80}",
                change="return a float",
            ) from error
        if not math.isfinite(number):
            raise CheckError(
                f"expected a finite reward {where}, got {number}: it crosses the wire as null",
                change="bound what the reward is computed from: a division by 0, a logarithm of 0, an overflow",
            )
        rewarded += reward is not None
    if steps and not rewarded:
        raise CheckWarnedError(
            f"expected some step to be rewarded, got null for each of {steps}: nobody can learn from that",
            change="set the reward of observations; where only good play is rewarded, show some in openenv.yaml: "
            "validation.episodes.example_actions",
        )
    return f"{seen} rewards"


@check(CheckLevel.RUNTIME)
def check_reward_in_range(subject: Subject) -> str:
    """Every reward of a step lies within the range that the manifest declares."""
    declared = subject.promises.validation.reward
    if declared is None:
        raise NotApplicableError("no range is declared: validation.reward.range in openenv.yaml")
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
                    raise CheckError(
                        f"expected the reward {turn.where} to lie within {low:g} to {high:g}, got {reward}",
                        change="correct the reward, or validation.reward.range in openenv.yaml; rewards are those "
                        "of one step, never a sum",
                    )
    return f"{len(seen)} rewards from {min(seen):g} to {max(seen):g}" if seen else "no step had a reward"


@check(CheckLevel.RUNTIME)
def check_observations_serialisable(subject: Subject) -> str:
    """What reset, step and state return are models that JSON can hold, and that can be read back."""
    seen = 0
    for where, observation in _raw(subject):
        seen += 1
        if not isinstance(observation, Observation):
            raise CheckError(
                f"expected an Observation {where}, got {type(observation).__name__}: {observation!r:.120}",
                change="return an instance of the observation model",
            )
        _round_trip(observation, where)
    return f"{seen} observations"


@check(CheckLevel.RUNTIME)
def check_observations_stay(subject: Subject) -> str:
    """An observation stays as it was while the episode goes on."""
    seen = 0
    before: tuple[str, BaseModel, bytes] | None = None
    for where, observation in _raw(subject):
        if before is not None and _text(before[1]) != before[2]:
            raise CheckError(
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
        raise CheckError(
            f"expected {model.__name__} {where} to go into JSON, got {type(error).__name__}: {error}",
            change="keep to what JSON has, numpy and bytes: no open files, functions, sockets or engine objects",
        ) from error
    try:
        model.model_validate(json.loads(text))
    except Exception as error:
        raise CheckError(
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
                raise CheckError(
                    f"expected reset(seed={seed}) to return an observation, got {type(error).__name__}: {error}",
                    change="make reset work on a new instance, with a seed and without any other option, or give what "
                    "it needs in openenv.yaml: validation.episodes.reset_options",
                ) from error
            yield f"of reset(seed={seed})", observation
            step = refused = 0
            until = time.monotonic() + SUFFICIENT_PLAY_S
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
