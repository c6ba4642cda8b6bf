"""Episodes that are to be the same: where they are played, and where two of them part."""

import asyncio
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, Self, TypeAlias
from weakref import WeakKeyDictionary

from openenv_core.apps import Described
from openenv_core.checker.check import CheckFailed
from openenv_core.checker.subject import Client, Episode, Subject
from openenv_core.errors import ClientError
from openenv_core.protocol import codes
from openenv_core.protocol.codes import Refusal
from openenv_core.protocol.replies import decode_reply, encode_observation
from openenv_core.protocol.requests import RequestDecoder

Result: TypeAlias = dict[str, Any]

STEPS: Final = 50
"""Steps after which an episode that is to be compared is broken off."""

EPISODE_ID: Final = "ropewalk-check"
"""Every compared episode has it, so that environments that show it show the same."""

REFUSED_AT_MOST: Final = 25

SEEDED: Final = (
    "draw everything that is left to chance from a generator that reset makes of its seed: "
    "self._random = random.Random(seed)"
)


class LocalSession:
    """One instance of an environment in this process, called as a server calls it.

    Its results are what would cross the wire, so that they can be compared with what did.

    Args:
        served: What the application serves.
    """

    def __init__(self, served: Described) -> None:
        self._decoder: RequestDecoder[Any] = RequestDecoder(served.action)
        self._runner = asyncio.Runner()
        try:
            self._environment = served.factory()
        except Exception as error:
            self._runner.close()
            raise CheckFailed(
                f"expected the environment's constructor to return, got {type(error).__name__}: {error}",
                change="make the constructor work without arguments, any number of times",
            ) from error

    def reset(self, seed: int, episode_id: str = EPISODE_ID) -> Result:
        """Begin an episode."""
        method = self._method("reset")
        options = _accepted(method, {"seed": seed, "episode_id": episode_id})
        return self._called(lambda: method(**options))

    def step(self, action: dict[str, Any]) -> Result:
        """Apply one action."""
        try:
            decoded = self._decoder.action(action, 0)
        except Refusal as refusal:
            return {"error": refusal.code}
        return self._called(lambda: self._method("step")(decoded))

    def close(self) -> None:
        """Give back what the instance holds."""
        if callable(close := getattr(self._environment, "close", None)):
            with suppress(Exception):  # another check's to tell
                self._wait(close)
        self._runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _method(self, name: str) -> Callable[..., Any]:
        method = getattr(self._environment, f"{name}_async", None) or getattr(self._environment, name)
        found: Callable[..., Any] = method
        return found

    def _called(self, call: Callable[[], Any]) -> Result:
        try:
            data = decode_reply(encode_observation(self._wait(call)), "observation")
        except Exception:  # a server answers each of them like this
            return {"error": codes.EXECUTION_ERROR}
        return {"observation": data["observation"], "reward": data["reward"], "done": data["done"]}

    def _wait(self, call: Callable[[], Any]) -> Any:
        result = call()
        return self._runner.run(_awaited(result)) if inspect.isawaitable(result) else result


async def _awaited(value: Any) -> Any:
    return await value


def takes_seed(served: Described) -> bool | None:
    """Whether the environment's reset takes a seed; None where its class is not known before there is one."""
    if not isinstance(served.factory, type):
        return None
    method = getattr(served.factory, "reset_async", None) or getattr(served.factory, "reset", None)
    return None if method is None else "seed" in _accepted(method, {"seed": 0})


def _accepted(method: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that a method takes, as a server would pass them."""
    parameters = inspect.signature(method).parameters
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return options
    return {name: value for name, value in options.items() if name in parameters}


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
        episode: Episode = subject.episode(
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
        raise CheckFailed(
            f"expected {doing} to be played over the wire, got {type(error).__name__}: {error}",
            change="look at what the server prints: `ropewalk serve` with the same target shows it",
        ) from error


def some_actions(subject: Subject, seed: int) -> list[dict[str, Any]]:
    """Return actions for one compared episode."""
    chosen = subject.actions(seed)
    steps = min(STEPS, subject.limits.steps, subject.promises.validation.episodes.max_steps)
    return [next(chosen) for _ in range(steps)]


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


_known: WeakKeyDictionary[Subject, dict[str, Any]] = WeakKeyDictionary()


def once(subject: Subject, name: str, find: Callable[[], Any]) -> Any:
    """Find something out about a subject, at most once: checks build on what others found."""
    known = _known.setdefault(subject, {})
    if name not in known:
        known[name] = find()
    return known[name]
