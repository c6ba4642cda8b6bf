"""Plays episodes, in this process or over the wire, and compares them."""

import copy
import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Self, TypeAlias

from openenv_core.checker.check import CheckError
from openenv_core.checker.subject import Client, Subject
from openenv_core.errors import ClientError, ExecutionError, ValidationFailedError
from openenv_core.loop_thread import shared_loop
from openenv_core.protocol import errors as codes
from openenv_core.protocol.errors import RefusalError
from openenv_core.protocol.frames import RequestDecoder, decode_reply, encode_observation
from openenv_core.targets import AppDescription
from openenv_core.types import StepResult

EPISODES: Final = 10
"""Number of episodes that a check plays, each with its own seed."""

STEPS: Final = 50
"""Steps after which an episode is aborted, unless its end matters."""

SUFFICIENT_PLAY_S: Final = 20.0
"""Seconds after which a check plays no further episodes, and an episode no further steps; at least one is played."""

EPISODE_ID: Final = "ropewalk-check"
"""The id of every compared episode, the same for all because some environments show it in observations."""

MAX_REFUSED_IN_A_ROW: Final = 25
"""Number of consecutive refused actions after which play ends with an error."""

REFUSAL_CAUSE: Final = "refuses valid actions"
"""The cause of every failure of an environment that refuses the actions that its schema allows."""

Result: TypeAlias = dict[str, Any]
"""The result of a reset or a step in comparable form: {observation, reward, done}, or {error}."""


class LocalEnvironment:
    """An instance of the environment in this process, for what only its own objects show.

    Its methods return the environment's own objects, and raise the client's exceptions. It gets copies of the options,
    which it may change, at every reset.

    Args:
        app: The application that serves the environment.
        reset_options: Options for every reset.

    Raises:
        ExecutionError: The environment's constructor raised.
    """

    def __init__(self, app: AppDescription, reset_options: Mapping[str, Any] | None = None) -> None:
        self._reset_options = dict(reset_options or {})
        self._decoder: RequestDecoder[Any] = RequestDecoder(app.action)
        self._instance: Any = None
        self._instance = self._call(app.factory)

    def reset(self, **options: Any) -> Any:
        """Begin an episode, with those of the options that the environment accepts."""
        method = method_of(self._instance, "reset")
        return self._call(
            method, **accepted_options(method, copy.deepcopy({**self._reset_options, **options}))
        )

    def step(self, action: Any) -> Any:
        """Apply an action, given as a dict of its fields."""
        try:
            decoded = self._decoder.action(action, 0)
        except RefusalError as refusal:
            raise ValidationFailedError(refusal.message, refusal.code) from refusal
        return self._call(method_of(self._instance, "step"), decoded)

    def snapshot(self) -> None:
        """Take a snapshot of the running episode, and close it."""
        state = self._call(self._instance.snapshot)
        if callable(close := getattr(state, "close", None)):
            self._call(close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ExecutionError):  # other checks report it
            if callable(close := getattr(self._instance, "close", None)):
                self._call(close)

    def _call(self, method: Callable[..., Any], *values: Any, **options: Any) -> Any:
        try:
            call = partial(method, *values, **options)
            if not getattr(self._instance, "BLOCKING", True):  # a server calls it on its event loop
                return shared_loop().run(_call_and_await, call)
            result = call()
            return (
                shared_loop().run(_call_and_await, lambda: result) if inspect.isawaitable(result) else result
            )
        except Exception as error:
            raise ExecutionError(f"{type(error).__name__}: {error}", codes.EXECUTION_ERROR) from error


def method_of(environment: Any, name: str) -> Callable[..., Any]:
    """Return the method of an environment, or of its class, that a server calls."""
    method: Callable[..., Any] = getattr(environment, f"{name}_async", None) or getattr(environment, name)
    return method


def accepted_options(method: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that a method accepts, as a server would pass them."""
    parameters = inspect.signature(method).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return options
    return {name: value for name, value in options.items() if name in parameters}


async def _call_and_await(call: Callable[[], Any]) -> Any:
    result = call()
    return await result if inspect.isawaitable(result) else result


@dataclass(frozen=True, slots=True)
class Turn:
    """The result of a reset or a step.

    Attributes:
        seed: The episode's seed.
        step: Number of the episode's steps that gave an observation so far; 0 for the reset.
        refused: Number of its steps that were refused so far.
        action: The action; None for the reset.
        result: A `StepResult`, or the return value of the environment's method; None if refused.
        error: The error code if refused.
    """

    seed: int
    step: int
    refused: int
    action: dict[str, Any] | None
    result: Any
    error: str | None = None

    @property
    def position_text(self) -> str:
        """The position in the episode, for an error message."""
        if self.action is None:
            return f"of reset(seed={self.seed})"
        return f"of step {self.step} after reset(seed={self.seed}), action {self.action!r:.120},"

    @property
    def done(self) -> bool:
        """Whether the episode is over."""
        return bool(getattr(self.result, "done", False))

    @property
    def comparable(self) -> Result:
        """The result as sent over the wire, without metadata: it is meant for logs, and may contain the time."""
        if self.error is not None:
            return {"error": self.error}
        try:
            is_sent = isinstance(self.result, StepResult)
            sent = (
                vars(self.result) if is_sent else decode_reply(encode_observation(self.result), "observation")
            )
        except Exception:  # a server answers any exception with this code
            return {"error": codes.EXECUTION_ERROR}
        observation = {name: value for name, value in sent["observation"].items() if name != "metadata"}
        return {"observation": observation, "reward": sent["reward"], "done": sent["done"]}


def turns(
    environment: "Client | LocalEnvironment",
    seed: int,
    actions: Iterable[dict[str, Any]],
    **reset_options: Any,
) -> Iterator[Turn]:
    """Play an episode until it is done or out of actions; yield each turn, including refusals."""
    first = Turn(seed, 0, 0, None, environment.reset(seed=seed, **reset_options))
    yield first
    if not first.done:
        yield from continue_turns(environment, seed, actions)


def continue_turns(
    environment: "Client | LocalEnvironment", seed: int, actions: Iterable[dict[str, Any]]
) -> Iterator[Turn]:
    """Play actions in the current episode, as `turns` does after the reset."""
    consecutive = refused = step = 0
    for action in actions:
        try:
            result = environment.step(action)
        except (ValidationFailedError, ExecutionError) as error:
            consecutive, refused = consecutive + 1, refused + 1
            yield Turn(seed, step, refused, action, None, error.code)
            if consecutive >= MAX_REFUSED_IN_A_ROW:
                raise CheckError(
                    f"expected actions that the schema allows to be accepted, got {consecutive} refusals in a row, "
                    f"the last for {action}: {error}",
                    change="narrow the action's schema to what the environment accepts, or list "
                    "validation.episodes.example_actions in openenv.yaml",
                    cause=REFUSAL_CAUSE,
                ) from error
            continue
        consecutive, step = 0, step + 1
        turn = Turn(seed, step, refused, action, result)
        yield turn
        if turn.done:
            return


def play(
    environment: "Client | LocalEnvironment", seed: int, actions: Iterable[dict[str, Any]], **options: Any
) -> list[Result]:
    """Play an episode until it is done or out of actions; return its results in comparable form.

    Raises:
        CheckError: The environment refuses too many actions in a row, or the server does not reply.
    """
    with expect_answer(f"an episode with seed {seed}"):
        episode = turns(environment, seed, actions, **{"episode_id": EPISODE_ID, **options})
        return [turn.comparable for turn in episode]


def play_episode(
    subject: Subject,
    environment: "Client | LocalEnvironment",
    seed: int,
    *,
    steps: int = STEPS,
    seconds: float = SUFFICIENT_PLAY_S,
    **reset_options: Any,
) -> Iterator[Turn]:
    """Play an episode; yield each turn, without refusals."""
    deadline = 0.0
    for turn in turns(environment, seed, subject.actions(seed), **reset_options):
        if turn.error is None:
            yield turn
            if turn.action is None:  # the time is that of the steps: a reset may take longer
                deadline = time.monotonic() + seconds
            elif turn.step >= steps or time.monotonic() > deadline:
                return


def play_episodes(subject: Subject, client: Client) -> Iterator[Turn]:
    """Play a check's episodes over the wire; yield each turn."""
    for seed in seeds():
        yield from play_episode(subject, client, seed)


def play_in_process(subject: Subject) -> Iterator[Turn]:
    """Play a check's episodes in this process; yield each turn, with the environment's own objects."""
    for seed in seeds():
        with LocalEnvironment(subject.app, subject.reset_options) as environment:
            yield from play_episode(subject, environment, seed)


def seeds() -> Iterator[int]:
    """Yield the seeds of a check's episodes; fewer if they take long."""
    deadline = time.monotonic() + SUFFICIENT_PLAY_S
    for seed in range(EPISODES):
        yield seed
        if time.monotonic() > deadline:
            return


def draw_actions(subject: Subject, seed: int, max_steps: int = STEPS) -> list[dict[str, Any]]:
    """Return actions for an episode that is compared."""
    chosen = subject.actions(seed)
    steps = min(max_steps, subject.limits.steps, subject.manifest_or_defaults.validation.episodes.max_steps)
    return [next(chosen) for _ in range(steps)]


@contextmanager
def expect_answer(action: str) -> Iterator[None]:
    """Turn client errors in the block into `CheckError`."""
    try:
        yield
    except ClientError as error:
        text = f"{type(error).__name__}: {error}"
        raise CheckError(
            f"expected {action} without an error, got {text}",
            change="run `ropewalk serve` with the same target to see its output",
            cause=text,
        ) from error


def find_difference(first: Sequence[Result], second: Sequence[Result]) -> str | None:
    """Return a description of the first difference between two episodes, or None."""
    for number, (left, right) in enumerate(zip(first, second, strict=False)):
        if (difference := _find_difference(left, right, "")) is not None:
            position = "the reset" if number == 0 else f"step {number}"
            return f"at {position}, {difference}"
    if len(first) != len(second):
        return f"one ends after {len(first) - 1} steps and the other after {len(second) - 1}"
    return None


def _find_difference(left: Any, right: Any, path: str) -> str | None:
    parts: list[tuple[str, Any, Any]] | None = None
    if isinstance(left, dict) and isinstance(right, dict) and left.keys() == right.keys():
        parts = [(f"{path}.{key}" if path else key, left[key], right[key]) for key in left]
    elif isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        parts = [(f"{path}[{at}]", a, b) for at, (a, b) in enumerate(zip(left, right, strict=True))]
    if parts is not None:
        return next(filter(None, (_find_difference(a, b, part) for part, a, b in parts)), None)
    if type(left) is not type(right) or left != right:
        return f"{path or 'the result'} is {left!r:.80} in one and {right!r:.80} in the other"
    return None
