"""Playing episodes, in this process or over the wire, and comparing them.

`python -m openenv_core.checker.playing TARGET JOB OUT` plays episodes in an interpreter of its own. The job is a file
of JSON, `{"reset_options": {}, "episodes": [[seed, [action, ...]], ...]}`, and a list of episodes is what comes out,
in a file too: what the author's code prints cannot get in between.
"""

import asyncio
import inspect
import json
import math
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Self, TypeAlias

from openenv_core.checker.check import CheckError
from openenv_core.checker.subject import Client, Subject
from openenv_core.errors import ClientError, ExecutionError, ValidationFailedError
from openenv_core.protocol import errors as codes
from openenv_core.protocol.errors import RefusalError
from openenv_core.protocol.replies import decode_reply, encode_observation
from openenv_core.protocol.requests import RequestDecoder
from openenv_core.targets import AppDescription, load_app
from openenv_core.types import StepResult

EPISODES: Final = 10
"""Episodes that a check plays, with as many seeds."""

STEPS: Final = 50
"""Steps after which an episode that need not come to its end is broken off."""

SUFFICIENT_PLAY_S: Final = 20.0
"""After so many seconds a check that has seen an episode, or an episode that has seen a step, is content."""

EPISODE_ID: Final = "ropewalk-check"
"""Every compared episode has it, so that environments that show it show the same."""

MAX_REFUSED_IN_A_ROW: Final = 25
"""Actions in a row that may be refused, until nothing more is expected of drawing them."""

REFUSAL_CAUSE: Final = "refuses valid actions"
"""The cause of every failure of an environment that takes nothing that its schema allows."""

Result: TypeAlias = dict[str, Any]
"""What came of a reset or a step, to be compared: {observation, reward, done}, or {error}."""


class LocalEnvironment:
    """One instance, played in this process: it raises what a client would, and returns what its author wrote.

    Args:
        beside: Another instance, whose event loop this one shares, and which outlives it.

    Raises:
        CheckError: Its constructor raises.
    """

    def __init__(
        self,
        app: AppDescription,
        reset_options: Mapping[str, Any] | None = None,
        sibling: "LocalEnvironment | None" = None,
    ) -> None:
        self._reset_options = dict(reset_options or {})
        self._decoder: RequestDecoder[Any] = RequestDecoder(app.action)
        self._own_runner = asyncio.Runner() if sibling is None else None
        self._runner: asyncio.Runner = self._own_runner or sibling._runner  # type: ignore[union-attr] # one is given
        try:
            self._instance = app.factory()
        except Exception as error:
            self._end_runner()
            raise CheckError(
                f"expected the environment's constructor to return, got {type(error).__name__}: {error}",
                change="make the constructor work without arguments, any number of times",
            ) from error

    def reset(self, **options: Any) -> Any:
        """Begin an episode, with those options that the environment takes."""
        method = _method(self._instance, "reset")
        return self._call(method, **_accepted_options(method, {**self._reset_options, **options}))

    def step(self, action: Any) -> Any:
        """Apply one action, given by its fields."""
        try:
            decoded = self._decoder.action(action, 0)
        except RefusalError as refusal:
            raise ValidationFailedError(refusal.message, refusal.code) from refusal
        return self._call(_method(self._instance, "step"), decoded)

    @property
    def forkable(self) -> bool:
        """Whether the environment declares that it can be forked."""
        return getattr(self._instance, "FORKABLE", False) is True

    @contextmanager
    def snapshot(self) -> Iterator[Any]:
        """Keep a snapshot of the instance's state for the block."""
        state = self._call(self._instance.snapshot)
        try:
            yield state
        finally:
            if callable(close := getattr(state, "close", None)):
                self._call(close)

    def restore(self, state: Any) -> None:
        """Go on from the state of another instance."""
        self._call(self._instance.restore, state)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ExecutionError):  # another check's to tell
            if callable(close := getattr(self._instance, "close", None)):
                self._call(close)
        self._end_runner()

    def _end_runner(self) -> None:
        if self._own_runner is not None:
            self._own_runner.close()

    def _call(self, method: Callable[..., Any], *values: Any, **options: Any) -> Any:
        try:
            result = method(*values, **options)
            return self._runner.run(_await(result)) if inspect.isawaitable(result) else result
        except Exception as error:
            raise ExecutionError(f"{type(error).__name__}: {error}", codes.EXECUTION_ERROR) from error


def takes_seed(app: AppDescription) -> bool | None:
    """Whether the environment's reset takes a seed; None where its class is not known before there is one."""
    if not isinstance(app.factory, type):
        return None
    return "seed" in _accepted_options(_method(app.factory, "reset"), {"seed": 0})


def _method(environment: Any, name: str) -> Callable[..., Any]:
    method: Callable[..., Any] = getattr(environment, f"{name}_async", None) or getattr(environment, name)
    return method


def _accepted_options(method: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that a method takes, as a server would pass them."""
    parameters = inspect.signature(method).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return options
    return {name: value for name, value in options.items() if name in parameters}


async def _await(value: Awaitable[Any]) -> Any:
    return await value


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer of an environment.

    Attributes:
        seed: Of the episode.
        step: How many steps of it were answered with an observation; 0 for the reset.
        refused: How many were not.
        action: What was done; None for the reset.
        result: What came: a `StepResult`, or what the environment's own method returned; None for a refusal.
        error: The code of a refusal.
    """

    seed: int
    step: int
    refused: int
    action: dict[str, Any] | None
    result: Any
    error: str | None = None

    @property
    def where(self) -> str:
        """Where in which episode this is, for a message."""
        if self.action is None:
            return f"of reset(seed={self.seed})"
        return f"of step {self.step} after reset(seed={self.seed}), action {self.action!r:.120},"

    @property
    def done(self) -> bool:
        """Whether the environment said that the episode is over."""
        return bool(getattr(self.result, "done", False))

    @property
    def plain(self) -> Result:
        """The answer as what crosses the wire, or would."""
        if self.error is not None:
            return {"error": self.error}
        if isinstance(self.result, StepResult):
            data = {name: getattr(self.result, name) for name in ("observation", "reward", "done")}
        else:
            try:
                data = decode_reply(encode_observation(self.result), "observation")
            except Exception:  # a server answers each of them like this
                return {"error": codes.EXECUTION_ERROR}
        return {"observation": data["observation"], "reward": data["reward"], "done": data["done"]}


def turns(
    environment: "Client | LocalEnvironment",
    reset: Callable[..., Any],
    seed: int,
    actions: Iterable[dict[str, Any]],
    **reset_options: Any,
) -> Iterator[Turn]:
    """Play an episode until it is done or out of actions, and yield each answer as it comes, refusals too."""
    turn = Turn(seed, 0, 0, None, reset(seed=seed, **reset_options))
    yield turn
    in_a_row = refused = step = 0
    for action in () if turn.done else actions:
        try:
            result = environment.step(action)
        except (ValidationFailedError, ExecutionError) as error:
            in_a_row, refused = in_a_row + 1, refused + 1
            yield Turn(seed, step, refused, action, None, error.code)
            if in_a_row >= MAX_REFUSED_IN_A_ROW:
                raise CheckError(
                    f"expected actions that the schema allows to be taken, got {in_a_row} refusals in a row, "
                    f"the last for {action}: {error}",
                    change="narrow the action's schema to what the environment takes, or list "
                    "validation.episodes.example_actions in openenv.yaml",
                    cause=REFUSAL_CAUSE,
                ) from error
            continue
        in_a_row, step = 0, step + 1
        turn = Turn(seed, step, refused, action, result)
        yield turn
        if turn.done:
            return


def play(
    subject: Subject,
    environment: "Client | LocalEnvironment",
    seed: int,
    actions: Iterable[dict[str, Any]],
    **reset_options: Any,
) -> list[Result]:
    """Play an episode until it is done or out of actions, and return what can be compared.

    Raises:
        CheckError: The environment refuses one action after the other, or the server does not answer.
    """
    reset = (
        environment.reset
        if isinstance(environment, LocalEnvironment)
        else partial(subject.reset, environment)
    )
    options = {"episode_id": EPISODE_ID, **reset_options}
    with expect_answer(f"an episode with seed {seed}"):
        return [turn.plain for turn in turns(environment, reset, seed, actions, **options)]


def play_episode(
    subject: Subject,
    client: Client,
    seed: int,
    *,
    steps: int = STEPS,
    seconds: float = SUFFICIENT_PLAY_S,
    **reset_options: Any,
) -> Iterator[Turn]:
    """Play an episode over the wire and yield each answer as it comes. Refused actions are passed over."""
    reset = partial(subject.reset, client)
    return _limit_turns(turns(client, reset, seed, subject.actions(seed), **reset_options), steps, seconds)


def play_episodes(subject: Subject, client: Client) -> Iterator[Turn]:
    """Play the episodes that a check plays over the wire; yield each answer as it comes."""
    for seed in seeds():
        yield from play_episode(subject, client, seed)


def play_in_process(subject: Subject) -> Iterator[Turn]:
    """Play the same in this process: each answer as the environment returned it."""
    for seed in seeds():
        with LocalEnvironment(subject.app, subject.reset_options) as environment:
            episode = turns(environment, environment.reset, seed, subject.actions(seed))
            yield from _limit_turns(episode, STEPS, SUFFICIENT_PLAY_S)


def seeds() -> Iterator[int]:
    """Yield the seeds of the episodes that a check plays; fewer where they take long."""
    until = time.monotonic() + SUFFICIENT_PLAY_S
    for seed in range(EPISODES):
        yield seed
        if time.monotonic() > until:
            return


def some_actions(subject: Subject, seed: int, most: int = STEPS) -> list[dict[str, Any]]:
    """Return actions for one compared episode."""
    chosen = subject.actions(seed)
    steps = min(most, subject.limits.steps, subject.manifest_or_defaults.validation.episodes.max_steps)
    return [next(chosen) for _ in range(steps)]


def _limit_turns(episode: Iterator[Turn], steps: int, seconds: float) -> Iterator[Turn]:
    until = math.inf
    for turn in episode:
        if turn.error is None:
            yield turn
            if turn.action is None:
                until = time.monotonic() + seconds
            elif turn.step >= steps or time.monotonic() > until:
                return


@contextmanager
def expect_answer(doing: str) -> Iterator[None]:
    """Report an environment that does not answer as a failed check."""
    try:
        yield
    except ClientError as error:
        text = f"{type(error).__name__}: {error}"
        raise CheckError(
            f"expected {doing} to be played, got {text}",
            change="look at what the server prints: `ropewalk serve` with the same target shows it",
            cause=text,
        ) from error


def find_difference(first: Sequence[Result], second: Sequence[Result]) -> str | None:
    """Return where two episodes part; None where they are the same.

    Metadata is left out: it is there for logs, and may tell the time.
    """
    for number, (left, right) in enumerate(zip(first, second, strict=False)):
        if (difference := _find_difference(_to_comparable(left), _to_comparable(right), "")) is not None:
            place = "the reset" if number == 0 else f"step {number}"
            return f"at {place}, {difference}"
    if len(first) != len(second):
        return f"one ends after {len(first) - 1} steps and the other after {len(second) - 1}"
    return None


def _to_comparable(result: Result) -> Result:
    observation = result.get("observation")
    if isinstance(observation, dict):
        observation = {name: value for name, value in observation.items() if name != "metadata"}
        return {**result, "observation": observation, "metadata": None}
    return result


def _find_difference(left: Any, right: Any, path: str) -> str | None:
    if isinstance(left, dict) and isinstance(right, dict) and left.keys() == right.keys():
        parts = ((f"{path}.{key}" if path else key, left[key], right[key]) for key in left)
        return next(
            (difference for place, a, b in parts if (difference := _find_difference(a, b, place))), None
        )
    if isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        pairs = enumerate(zip(left, right, strict=True))
        return next(
            (difference for at, (a, b) in pairs if (difference := _find_difference(a, b, f"{path}[{at}]"))),
            None,
        )
    if type(left) is not type(right) or left != right:
        return f"{path or 'the result'} is {_short(left)} in one and {_short(right)} in the other"
    return None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def main(target: str, job: str, out: str) -> None:
    """Play each episode in an instance of its own."""
    app = load_app(target)
    job_document = json.loads(Path(job).read_text(encoding="utf-8"))
    episodes = []
    for seed, actions in job_document["episodes"]:
        with LocalEnvironment(app, job_document["reset_options"]) as environment:
            episode = turns(environment, environment.reset, seed, actions, episode_id=EPISODE_ID)
            episodes.append([turn.plain for turn in episode])
    Path(out).write_text(json.dumps(episodes), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
