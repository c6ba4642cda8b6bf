"""Episodes in this process or over the wire, played for the sake of what is seen on the way."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, Self, TypeAlias

from pydantic import TypeAdapter

from openenv_core.apps import Described
from openenv_core.checker.check import CheckError
from openenv_core.checker.subject import REFUSED_AT_MOST, Client, Subject, refusing
from openenv_core.errors import ClientError, ExecutionError, ValidationFailedError
from openenv_core.protocol import errors as codes
from openenv_core.protocol.errors import RefusalError
from openenv_core.protocol.replies import decode_reply, encode_observation
from openenv_core.protocol.requests import RequestDecoder
from openenv_core.types import StepResult

Result: TypeAlias = dict[str, Any]
"""What came of a reset or a step: {observation, reward, done}, or {error}."""


def parting(one: Sequence[Result], other: Sequence[Result]) -> str | None:
    """Return where two episodes part; None where they are the same.

    Metadata is left out: it is there for logs, and may tell the time.
    """
    for number, (left, right) in enumerate(zip(one, other, strict=False)):
        if (found := _parting(_compared(left), _compared(right), "")) is not None:
            place = "the reset" if number == 0 else f"step {number}"
            return f"at {place}, {found}"
    if len(one) != len(other):
        return f"one ends after {len(one) - 1} steps and the other after {len(other) - 1}"
    return None


def _compared(result: Result) -> Result:
    if "error" in result:
        return {"error": result["error"]}
    observation = result["observation"]
    if isinstance(observation, dict):
        observation = {name: value for name, value in observation.items() if name != "metadata"}
    return {"observation": observation, "reward": result["reward"], "done": result["done"]}


def _parting(left: Any, right: Any, path: str) -> str | None:
    if isinstance(left, dict) and isinstance(right, dict) and left.keys() == right.keys():
        parts = ((f"{path}.{key}" if path else key, left[key], right[key]) for key in left)
        return next((found for place, a, b in parts if (found := _parting(a, b, place))), None)
    if isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        pairs = enumerate(zip(left, right, strict=True))
        return next((found for at, (a, b) in pairs if (found := _parting(a, b, f"{path}[{at}]"))), None)
    if type(left) is not type(right) or left != right:
        return f"{path or 'the result'} is {_short(left)} in one and {_short(right)} in the other"
    return None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


EPISODE_ID: Final = "ropewalk-check"
"""Every compared episode has it, so that environments that show it show the same."""


class LocalEnvironment:
    """One instance. What its methods return is what its author wrote, unencoded.

    Args:
        served: What the application serves.
        reset_options: What every reset is given besides.

    Raises:
        CheckError: Its constructor raises.
    """

    def __init__(self, served: Described, reset_options: Mapping[str, Any] | None = None) -> None:
        self._reset_options = dict(reset_options or {})
        self._actions: TypeAdapter[Any] = TypeAdapter(served.action)
        self._runner = asyncio.Runner()
        try:
            self._instance = served.factory()
        except Exception as error:
            self._runner.close()
            raise CheckError(
                f"expected the environment's constructor to return, got {type(error).__name__}: {error}",
                change="make the constructor work without arguments, any number of times",
            ) from error

    def reset(self, **options: Any) -> Any:
        """Begin an episode, with those options that the environment takes."""
        method = self._method("reset")
        return self._called(method, **_accepted(method, {**self._reset_options, **options}))

    def step(self, action: dict[str, Any]) -> Any:
        """Apply one action, given by its fields."""
        return self.apply(self._actions.validate_python(action))

    def apply(self, action: Any) -> Any:
        """Apply one action, given as an instance of its model."""
        return self._called(self._method("step"), action)

    def state(self) -> Any:
        """Read the state."""
        return self._instance.state

    def close(self) -> None:
        """Give back what the instance holds."""
        with suppress(Exception):  # another check's to tell
            if callable(close := getattr(self._instance, "close", None)):
                self._called(close)
        self._runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _method(self, name: str) -> Callable[..., Any]:
        return _method_of(self._instance, name)

    def _called(self, method: Callable[..., Any], *values: Any, **options: Any) -> Any:
        found = method(*values, **options)
        return self._runner.run(_awaited(found)) if inspect.isawaitable(found) else found


class LocalSession:
    """One instance whose results are what would cross the wire, so that they can be compared with what did.

    Args:
        served: What the application serves.
        reset_options: What every reset is given besides.
    """

    def __init__(self, served: Described, reset_options: Mapping[str, Any] | None = None) -> None:
        self._decoder: RequestDecoder[Any] = RequestDecoder(served.action)
        self._environment = LocalEnvironment(served, reset_options)

    def reset(self, seed: int, episode_id: str = EPISODE_ID) -> Result:
        """Begin an episode."""
        return _answer(lambda: self._environment.reset(seed=seed, episode_id=episode_id))

    def step(self, action: dict[str, Any]) -> Result:
        """Apply one action."""
        try:
            decoded = self._decoder.action(action, 0)
        except RefusalError as refusal:
            return {"error": refusal.code}
        return _answer(lambda: self._environment.apply(decoded))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._environment.close()


def takes_seed(served: Described) -> bool | None:
    """Whether the environment's reset takes a seed; None where its class is not known before there is one."""
    if not isinstance(served.factory, type):
        return None
    return "seed" in _accepted(_method_of(served.factory, "reset"), {"seed": 0})


def _method_of(environment: Any, name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(environment, f"{name}_async", None) or getattr(environment, name)
    return found


def _accepted(method: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that a method takes, as a server would pass them."""
    parameters = inspect.signature(method).parameters
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return options
    return {name: value for name, value in options.items() if name in parameters}


def _answer(call: Callable[[], Any]) -> Result:
    try:
        data = decode_reply(encode_observation(call()), "observation")
    except Exception:  # a server answers each of them like this
        return {"error": codes.EXECUTION_ERROR}
    return {"observation": data["observation"], "reward": data["reward"], "done": data["done"]}


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


STEPS: Final = 50
"""Steps after which an episode that is to be compared is broken off."""


def play_here(session: LocalSession, seed: int, actions: Sequence[dict[str, Any]]) -> list[Result]:
    """Play one episode in this process until it is done, or out of actions."""
    results = [session.reset(seed)]
    refused = 0
    for action in actions:
        if results[-1].get("done") or refused >= REFUSED_AT_MOST:
            break
        results.append(session.step(action))
        refused = refused + 1 if "error" in results[-1] else 0
    return results


def play_there(
    subject: Subject, client: Client, seed: int, actions: Sequence[dict[str, Any]], **reset_options: Any
) -> list[Result]:
    """Play the same over the wire."""
    options = {"episode_id": EPISODE_ID, **reset_options}
    with answered(f"an episode with seed {seed}"):
        episode = subject.episode(
            client, seed=seed, actions=iter(actions), max_steps=max(1, len(actions)), **options
        )
    return episode.results


@contextmanager
def answered(doing: str) -> Iterator[None]:
    """Tell of a server that does not answer as of a property that does not hold.

    Args:
        doing: What was asked of it.
    """
    try:
        yield
    except ClientError as error:
        raise CheckError(
            f"expected {doing} to be played over the wire, got {type(error).__name__}: {error}",
            change="look at what the server prints: `ropewalk serve` with the same target shows it",
            cause=f"{type(error).__name__}: {error}",
        ) from error


def some_actions(subject: Subject, seed: int) -> list[dict[str, Any]]:
    """Return actions for one compared episode."""
    chosen = subject.actions(seed)
    steps = min(STEPS, subject.limits.steps, subject.promises.validation.episodes.max_steps)
    return [next(chosen) for _ in range(steps)]


EPISODES: Final = 10
"""Episodes that a check plays, with as many seeds."""
"""Steps of an episode that need not come to its end."""

SUFFICIENT_PLAY_S: Final = 20.0
"""After so many seconds a check that has seen an episode, or an episode that has seen a step, is content."""


@dataclass(frozen=True, slots=True)
class PlayedStep:
    """One answer of an environment.

    Attributes:
        seed: Of the episode.
        step: How many steps of it were answered with an observation; 0 for the reset.
        refused: How many were not.
        action: What was done; None for the reset.
        result: What came.
    """

    seed: int
    step: int
    action: dict[str, Any] | None
    result: StepResult[dict[str, Any]]
    refused: int = 0

    @property
    def where(self) -> str:
        """Where in which episode this is, for a message."""
        if self.action is None:
            return f"of reset(seed={self.seed})"
        return f"of step {self.step} after reset(seed={self.seed}), action {self.action!r:.120},"


def seeds() -> Iterator[int]:
    """Yield the seeds of the episodes that a check plays; fewer where they take long."""
    until = time.monotonic() + SUFFICIENT_PLAY_S
    for seed in range(EPISODES):
        yield seed
        if time.monotonic() > until:
            return


def played(
    subject: Subject,
    client: Client,
    seed: int,
    *,
    steps: int = STEPS,
    seconds: float = SUFFICIENT_PLAY_S,
    **reset_options: Any,
) -> Iterator[PlayedStep]:
    """Play an episode and yield each answer as it comes. Refused actions are passed over.

    Args:
        subject: What is played.
        client: Plays it.
        seed: Of the reset and of the actions.
        steps: After so many the episode is left.
        seconds: After so many it is left as well.
        reset_options: Further options of the reset.

    Raises:
        CheckError: The environment refuses one action after the other.
    """
    yield PlayedStep(seed, 0, None, subject.reset(client, seed=seed, **reset_options))
    refused = step = in_all = 0
    until = time.monotonic() + seconds
    for action in subject.actions(seed):
        try:
            result = client.step(action)
        except (ValidationFailedError, ExecutionError) as error:
            refused, in_all = refused + 1, in_all + 1
            if refused >= REFUSED_AT_MOST:
                raise refusing(refused, action, error) from error
            continue
        refused, step = 0, step + 1
        yield PlayedStep(seed, step, action, result, in_all)
        if result.done or step >= steps or time.monotonic() > until:
            return
