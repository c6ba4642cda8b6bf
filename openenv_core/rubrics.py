"""Rubrics: scores of actions and observations, composed of smaller ones.

    class Legal(Rubric):
        def forward(self, action, observation):
            return float(observation.legal)

    rubric = Sequential(Gate(Legal()), WeightedSum([Solved(), Short()], [0.8, 0.2]))

`Environment(rubric=...)` takes a rubric or any other callable of an action and an observation. `forward` may be a
coroutine function. A rubric without asynchronous parts returns its score directly; any other returns an awaitable.

A composed rubric writes the scores of its parts, by path, to the observation's metadata under `rubric`.

`reset`, `reset_async`, `state_dict` and `load_state_dict` cover the parts, even where a subclass overrides them without
calling those of its base class: an override handles the rubric's own state only.
"""

import asyncio
import copy
import functools
import inspect
import math
import re
from abc import ABC, abstractmethod
from collections.abc import (
    Awaitable,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from types import EllipsisType
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeAlias

from typing_extensions import TypeIs

from openenv_core.errors import LLMError, NoScoreError
from openenv_core.outcomes import SCORES
from openenv_core.protocol.jsonio import from_json

if TYPE_CHECKING:
    from openenv_core.llm_client import LLMClient

Score: TypeAlias = float | Awaitable[float]
"""A rubric's score; an awaitable if a part is asynchronous."""

Hook: TypeAlias = Callable[["Rubric", Any, Any, float], object]
"""Called with the rubric, the action, the observation and the score; may be a coroutine function."""

PreHook: TypeAlias = Callable[["Rubric", Any, Any], object]
"""Called with the rubric, the action and the observation; may be a coroutine function."""


class KnownScore(float):
    """A known score that can also be awaited, because callers must await the scores of released containers."""

    def __await__(self) -> Generator[Any, Any, float]:
        yield from ()
        return float(self)


def is_pending(score: object) -> TypeIs[Awaitable[float]]:
    """Whether a score must be awaited to get its value."""
    return inspect.isawaitable(score) and not isinstance(score, KnownScore)


_Steps: TypeAlias = Generator[Awaitable[Any], Any, float]


def _walk(whole: "Rubric") -> Iterator[tuple[str, "Rubric"]]:
    """Yield a rubric and all of its parts, each with what its keys begin with in the state of the whole."""
    yield "", whole
    for path, part in whole.named_rubrics():
        yield f"{path}.", part


def _own(rubric: "Rubric", name: str) -> Callable[..., Any]:
    """Return a life-cycle method without the parts."""
    return functools.partial(getattr(type(rubric), name).own, rubric)


def _reset(whole: "Rubric") -> None:
    for _, rubric in _walk(whole):
        _own(rubric, "reset")()


async def _reset_async(whole: "Rubric") -> None:
    for _, rubric in _walk(whole):
        if inspect.isawaitable(pending := _own(rubric, "reset_async")()):
            await pending


def _state_dict(whole: "Rubric") -> dict[str, Any]:
    return {
        prefix + key: value
        for prefix, rubric in _walk(whole)
        for key, value in _own(rubric, "state_dict")().items()
    }


def _load_state_dict(whole: "Rubric", state: Mapping[str, Any]) -> None:
    left = dict(state)
    # The parts first: what is left is of the enclosing rubric.
    for prefix, rubric in reversed([*_walk(whole)]):
        keys = [key for key in left if key.startswith(prefix)]
        if keys or rubric is whole:
            _own(rubric, "load_state_dict")({key.removeprefix(prefix): left.pop(key) for key in keys})


_LIFE_CYCLE: Final[Mapping[str, Callable[..., Any]]] = {
    "reset": _reset,
    "reset_async": _reset_async,
    "state_dict": _state_dict,
    "load_state_dict": _load_state_dict,
}


def _cover_parts(name: str, own: Callable[..., Any]) -> Any:
    """Make a life-cycle method cover the parts too; where an override in a subclass calls it, it is `own` alone."""

    @functools.wraps(own)
    def method(self: "Rubric", *args: Any, **options: Any) -> Any:
        is_overridden = getattr(type(self), name) is not method
        return (own if is_overridden else _LIFE_CYCLE[name])(self, *args, **options)

    method.own = own  # type: ignore[attr-defined]
    return method


def _rubrics_in(name: str, value: Any) -> Iterator[tuple[str, "Rubric"]]:
    """Yield the rubrics in a list, tuple or dict, and in those that it holds, as pairs of a weight and a rubric are."""
    if isinstance(value, dict):
        items: Iterable[tuple[Any, Any]] = list(value.items())
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    else:
        return
    for key, item in items:
        if isinstance(item, Rubric):
            yield f"{name}_{key}", item
            continue
        held = list(_rubrics_in(f"{name}_{key}", item))
        yield from held
        # The first item shows what a list holds: a trajectory may be long.
        if not held and item is not None and not isinstance(value, tuple):
            return


class Rubric(ABC):
    """Base class of rubrics. Rubrics assigned to attributes, alone or in lists, tuples or dicts, become children.

    Attributes:
        last_score: The last score; None before the first call.
    """

    last_score: float | None = None
    _state_names: ClassVar[tuple[str, ...]] = ()  # attributes that `state_dict` returns
    _has_scored = False  # since the enclosing rubric was called

    @abstractmethod
    def forward(self, action: Any, observation: Any) -> Score:
        """Return the score of an action that led to an observation."""

    def __call__(self, action: Any, observation: Any) -> Score:
        """Compute the score and call the hooks. Returns an awaitable if any part is asynchronous."""
        return _run(self._call(action, observation))

    def _call(self, action: Any, observation: Any) -> _Steps:
        for pre_hook in self._forward_pre_hooks:
            if inspect.isawaitable(pending := pre_hook(self, action, observation)):
                yield pending
        for rubric in self.rubrics():
            rubric._has_scored = False
        score = self.forward(action, observation)
        if is_pending(score):
            score = yield score
        self.last_score, self._has_scored = score, True
        if next(self.children(), None) is not None:
            self._report(observation)
        for hook in self._forward_hooks:
            if inspect.isawaitable(pending := hook(self, action, observation, score)):
                yield pending
        return score

    def _report(self, observation: Any) -> None:
        """Write the scores of the parts that were called to the metadata; an enclosing rubric overwrites them later."""
        if isinstance(metadata := getattr(observation, "metadata", None), dict):
            scored = [
                (path, rubric.last_score) for path, rubric in self.named_rubrics() if rubric._has_scored
            ]
            metadata[SCORES] = {path: float(score) for path, score in scored if score is not None}

    def __new__(cls, *_: Any, **__: Any) -> "Rubric":
        """Initialize children and hooks, so that subclasses need not call `__init__`."""
        self = super().__new__(cls)
        object.__setattr__(self, "_children", {})
        object.__setattr__(self, "_forward_pre_hooks", [])
        object.__setattr__(self, "_forward_hooks", [])
        return self

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in _LIFE_CYCLE:
            if not hasattr(own := getattr(cls, name), "own"):
                setattr(cls, name, _cover_parts(name, own))

    _children: dict[str, "Rubric"]
    _forward_pre_hooks: list[PreHook]
    _forward_hooks: list[Hook]

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, Rubric):
            self._children[name] = value
        else:
            self._children.pop(name, None)
        super().__setattr__(name, value)

    def register_forward_hook(self, hook: Hook) -> None:
        """Register a hook that is called after every score."""
        self._forward_hooks.append(hook)

    def register_forward_pre_hook(self, hook: PreHook) -> None:
        """Register a hook that is called before every score."""
        self._forward_pre_hooks.append(hook)

    def children(self) -> Iterator["Rubric"]:
        """Yield the child rubrics."""
        yield from (rubric for _, rubric in self.named_children())

    def named_children(self) -> Iterator[tuple[str, "Rubric"]]:
        """Yield the child rubrics by the names of their attributes; in a list or dict, `NAME_0` or `NAME_KEY`."""
        yield from self._children.items()
        known = {id(rubric) for rubric in self._children.values()}
        for name, value in list(vars(self).items()):
            yield from (
                (path, rubric) for path, rubric in _rubrics_in(name, value) if id(rubric) not in known
            )

    def rubrics(self) -> Iterator["Rubric"]:
        """Yield all descendants."""
        yield from (rubric for _, rubric in self.named_rubrics())

    def named_rubrics(self, prefix: str = "") -> Iterator[tuple[str, "Rubric"]]:
        """Yield all descendants with their paths, such as `outer.inner`."""
        for name, child in self.named_children():
            path = f"{prefix}.{name}" if prefix else name
            yield path, child
            yield from child.named_rubrics(path)

    def get_rubric(self, path: str) -> "Rubric":
        """Return the rubric at a path.

        Raises:
            KeyError: There is no rubric at the path.
        """
        rubrics = dict(self.named_rubrics())
        if path not in rubrics:
            raise KeyError(f"there is no rubric at {path!r}, only at {', '.join(rubrics)}")
        return rubrics[path]

    @functools.partial(_cover_parts, "reset")  # noqa: B027 - most keep no state
    def reset(self) -> None:
        """Clear the state of an episode, of the parts too."""

    @functools.partial(_cover_parts, "reset_async")
    async def reset_async(self) -> None:
        """Clear the state of an episode as `reset` does; called instead of it where `reset_async` may be awaited."""
        _own(self, "reset")()

    @functools.partial(_cover_parts, "state_dict")
    def state_dict(self) -> dict[str, Any]:
        """Return the rubric's state, for `load_state_dict`; that of a part has its path before each key."""
        return {name: getattr(self, name) for name in self._state_names}

    @functools.partial(_cover_parts, "load_state_dict")
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        for name in self._state_names:
            if name in state:
                setattr(self, name, state[name])


def _run(steps: _Steps) -> Score:
    """Run the generator; from its first awaitable on, in a coroutine."""
    try:
        awaitable = next(steps)
    except StopIteration as done:
        score: float = done.value
        return score
    return _resume(steps, awaitable)


async def _resume(steps: _Steps, awaitable: Awaitable[Any]) -> float:
    while True:
        value = await awaitable
        try:
            awaitable = steps.send(value)
        except StopIteration as done:
            score: float = done.value
            return score


async def _gather(scores: Sequence[Awaitable[float]]) -> list[float]:
    """Await scores concurrently. If one fails, the others are cancelled."""
    tasks = [asyncio.ensure_future(score) for score in scores]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Combination(Rubric):
    """Base class of rubrics that combine the scores of others, which may be awaitable."""

    def __init__(self, rubrics: Iterable[Rubric]) -> None:
        self._rubrics = list(rubrics)
        for number, rubric in enumerate(self._rubrics):
            self._children[f"rubric_{number}"] = rubric

    def __call__(self, action: Any, observation: Any) -> Score:
        score = super().__call__(action, observation)
        return score if inspect.isawaitable(score) else KnownScore(score)

    def forward(self, action: Any, observation: Any) -> Score:
        return _run(self._combine(action, observation))

    @abstractmethod
    def _combine(self, action: Any, observation: Any) -> _Steps:
        """Yield awaitables, and return the score."""


class Sequential(_Combination):
    """Calls rubrics in order: 0 as soon as one gives 0, otherwise the last score; 1 if there are no rubrics."""

    def __init__(self, *rubrics: Rubric) -> None:
        super().__init__(rubrics)

    def _combine(self, action: Any, observation: Any) -> _Steps:
        score = 1.0
        for rubric in self._rubrics:
            child_score = rubric(action, observation)
            score = (yield child_score) if is_pending(child_score) else child_score
            if score == 0.0 or math.isnan(score):
                break
        return score

    def __len__(self) -> int:
        return len(self._rubrics)

    def __getitem__(self, index: int) -> Rubric:
        return self._rubrics[index]


class Gate(_Combination):
    """A rubric's score if it is at least `threshold`, otherwise 0."""

    _state_names = ("threshold",)

    def __init__(self, rubric: Rubric, threshold: float = 1.0) -> None:
        super().__init__(())
        self.rubric = rubric
        self.threshold = threshold

    def _combine(self, action: Any, observation: Any) -> _Steps:
        child_score = self.rubric(action, observation)
        score: float = (yield child_score) if is_pending(child_score) else child_score
        return 0.0 if score < self.threshold else score  # NaN, which is no score, is passed on


class WeightedSum(_Combination):
    """The weighted sum of scores. Asynchronous scores are awaited concurrently.

    Raises:
        ValueError: The number of weights differs from that of the rubrics, or their sum is not 1.
    """

    _state_names = ("weights",)

    def __init__(self, rubrics: Sequence[Rubric], weights: Sequence[float]) -> None:
        if len(rubrics) != len(weights):
            raise ValueError(
                f"the number of weights must match that of rubrics, got {len(weights)} and {len(rubrics)}"
            )
        if not math.isclose(sum(weights), 1.0, abs_tol=1e-6):
            raise ValueError(f"weights must sum to 1.0, got {sum(weights):g}")
        super().__init__(rubrics)
        self._weights = list(weights)

    @property
    def weights(self) -> list[float]:
        """A copy of the weights."""
        return list(self._weights)

    @weights.setter
    def weights(self, weights: Sequence[float]) -> None:
        self._weights = list(weights)

    def _combine(self, action: Any, observation: Any) -> _Steps:
        child_scores = [rubric(action, observation) for rubric in self._rubrics]
        waiting = [each for each in child_scores if is_pending(each)]
        awaited = iter((yield _gather(waiting)) if waiting else ())
        scores = [next(awaited) if is_pending(each) else each for each in child_scores]
        return math.fsum(weight * score for weight, score in zip(self._weights, scores, strict=True))


class RubricList(Rubric):
    """A list of rubrics, without a score of its own: the enclosing rubric combines their scores."""

    def __init__(self, rubrics: Iterable[Rubric] = ()) -> None:
        self._rubrics: list[Rubric] = []
        self.extend(rubrics)

    def forward(self, action: Any, observation: Any) -> Score:
        """Raise NotImplementedError: a list has no score."""
        raise NotImplementedError("a RubricList has no score; call the rubrics in it")

    def append(self, rubric: Rubric) -> None:
        """Add a rubric."""
        self._children[f"rubric_{len(self._rubrics)}"] = rubric
        self._rubrics.append(rubric)

    def extend(self, rubrics: Iterable[Rubric]) -> None:
        """Add several rubrics."""
        for rubric in rubrics:
            self.append(rubric)

    def __len__(self) -> int:
        return len(self._rubrics)

    def __getitem__(self, index: int) -> Rubric:
        return self._rubrics[index]

    def __iter__(self) -> Iterator[Rubric]:
        return iter(self._rubrics)


class RubricDict(Rubric, Mapping[str, Rubric]):
    """Rubrics by name, without a score of its own: for example one rubric per game."""

    __hash__ = object.__hash__

    def __init__(self, rubrics: Mapping[str, Rubric] | None = None) -> None:
        self.update(rubrics or {})

    def forward(self, action: Any, observation: Any) -> Score:
        """Raise NotImplementedError: a dict has no score."""
        raise NotImplementedError("a RubricDict has no score; call the rubrics in it")

    def update(self, rubrics: Mapping[str, Rubric]) -> None:
        """Add or replace rubrics."""
        self._children.update(rubrics)

    def __setitem__(self, name: str, rubric: Rubric) -> None:
        self._children[name] = rubric

    def __getitem__(self, name: str) -> Rubric:
        return self._children[name]

    def __len__(self) -> int:
        return len(self._children)

    def __iter__(self) -> Iterator[str]:
        return iter(self._children)


class TrajectoryRubric(Rubric):
    """Scores a whole episode at its end; every earlier step earns `intermediate_reward`.

    The trajectory holds copies, because an environment may change and return the same observation at every step.
    """

    _state_names: ClassVar[tuple[str, ...]] = ("intermediate_reward",)
    _latest: Any = None  # the last observation itself, whose reward the environment sets after the copy

    def __init__(self, intermediate_reward: float = 0.0) -> None:
        self.intermediate_reward = intermediate_reward
        self._trajectory: list[tuple[Any, Any]] = []

    @abstractmethod
    def score_trajectory(self, trajectory: list[tuple[Any, Any]]) -> float:
        """Return the score of an episode, given as its actions and observations."""

    @abstractmethod
    def compute_step_rewards(self) -> list[float]:
        """Return the share of the score for each step of the episode so far."""

    @property
    def trajectory(self) -> list[tuple[Any, Any]]:
        """A copy of the actions and observations so far."""
        return list(self._trajectory)

    def forward(self, action: Any, observation: Any) -> Score:
        """See `Rubric.forward`."""
        if self._trajectory and self._latest is not None:
            copied, reward = self._trajectory[-1][1], getattr(self._latest, "reward", None)
            if reward is not None and reward is not getattr(copied, "reward", None):
                copied.reward = reward
        self._trajectory.append(copy.deepcopy((action, observation)))
        self._latest = observation
        if getattr(observation, "done", False):
            return self.score_trajectory(self._trajectory)
        return self.intermediate_reward

    def reset(self) -> None:
        """Clear the trajectory."""
        self._trajectory = []


class ExponentialDiscountingTrajectoryRubric(TrajectoryRubric):
    """Discounts the score R by the number of steps until the end: r_t = gamma^(T-1-t) R, for T steps.

    Args:
        gamma: From 0 (only the last step gets the score) to 1 (all steps get it in full).
        intermediate_reward: See `TrajectoryRubric`.

    Raises:
        ValueError: Gamma is outside of 0 to 1.
    """

    _state_names = ("intermediate_reward", "gamma")

    def __init__(self, gamma: float = 0.99, intermediate_reward: float = 0.0) -> None:
        if not 0.0 <= gamma <= 1.0:
            raise ValueError(f"expected a gamma from 0 to 1, got {gamma:g}")
        super().__init__(intermediate_reward)
        self.gamma = gamma

    def compute_step_rewards(self) -> list[float]:
        """See `TrajectoryRubric.compute_step_rewards`."""
        if not self._trajectory:
            return []
        score, last = self.score_trajectory(self._trajectory), len(self._trajectory) - 1
        return [self.gamma ** (last - step) * score for step in range(last + 1)]


_FIRST_NUMBER: Final = r"(\d+\.?\d*)"
"""The released default of `LLMJudge`'s `score_pattern`. It ignores signs, exponents and what the number belongs to."""

_SCORE_LINE: Final = re.compile(r"\s*score\s*:\s*(\S+)\s*", re.IGNORECASE)
_FENCE: Final = re.compile(r"```(?:json)?\s*(.*?)\s*```", re.DOTALL)


class LLMJudge(Rubric):
    """Asks a language model for a score.

    The model is told to end its answer with one line, `Score: 0.5`; an answer that is JSON, `{"score": 0.5}`, is read
    too. A score outside of `score_range`, or an answer without one, raises `NoScoreError`: the step is unscored, which
    is not a score of 0.

    An explicit `score_pattern` or `default_score` selects the released behaviour: the prompt is sent as it is, the
    first match is the score, and an answer without one gets the default.

    The judged text is part of the prompt, so a policy can address the judge: request an answer format that cannot
    occur in that text, and parse it with `score_pattern`.

    Args:
        prompt_template: Prompt for `str.format`, with `{action}` and `{observation}`.
        client: Client of the model, for example `openenv_core.llm_client.OpenAIClient`.
        score_range: Lowest and highest valid score.
        score_pattern: Regular expression whose first group, or whole match without groups, is the score; with only a
            `default_score`, the first number.
        default_score: Score of an answer in which the pattern finds none, 0 if only a pattern is given; None raises
            `LLMError`.
        normalize: Clamp the pattern's scores to 0..1.
        timeout_s: Seconds within which the model must answer.

    Calls raise `LLMError` if the model cannot be reached, fails, or does not answer in time. That is an infrastructure
    failure, not a score.

    Raises:
        ValueError: The range is empty, or given with a pattern or a default, which have none.
    """

    _state_names = (
        "prompt_template",
        "score_range",
        "score_pattern",
        "default_score",
        "normalize",
        "timeout_s",
    )

    def __init__(
        self,
        prompt_template: str,
        client: "LLMClient",
        *,
        score_range: tuple[float, float] = (0.0, 1.0),
        score_pattern: str | None = None,
        default_score: float | EllipsisType | None = ...,
        normalize: bool = True,
        timeout_s: float = 60.0,
    ) -> None:
        low, high = self.score_range = (float(score_range[0]), float(score_range[1]))
        by_pattern = score_pattern is not None or default_score is not ...
        if not low < high or (by_pattern and self.score_range != (0.0, 1.0)):
            raise ValueError(
                f"expected a score_range from low to high, without score_pattern and default_score, got {score_range}"
            )
        self.prompt_template = prompt_template
        self._client = client
        self.score_pattern = score_pattern or _FIRST_NUMBER if by_pattern else None
        re.compile(self.score_pattern or "")  # an invalid one is an error here, not in the first step
        if default_score is ...:
            default_score = 0.0 if by_pattern else None
        self.default_score = default_score
        self.normalize = normalize
        self.timeout_s = timeout_s

    async def forward(self, action: Any, observation: Any) -> float:
        """See `Rubric.forward`.

        Raises:
            LLMError: The model did not answer in time, or its answer has no score and there is no default.
        """
        prompt = self._render_prompt(action, observation)
        # A subclass that parses answers itself has asked for its own format.
        if self.score_pattern is None and type(self)._parse_score is LLMJudge._parse_score:
            low, high = self.score_range
            prompt += (
                f"\n\nEnd your answer with one line, Score: NUMBER, where NUMBER is from {low:g} to {high:g}."
            )
        try:
            async with asyncio.timeout(self.timeout_s):
                answer = await self._client.complete(prompt)
        except TimeoutError as error:
            raise LLMError(
                f"expected the judge to answer within {self.timeout_s:g} s, got nothing; raise timeout_s, or ask a "
                "faster model"
            ) from error
        except LLMError:
            raise
        except Exception as error:
            raise LLMError(f"expected an answer of the judge, got {type(error).__name__}: {error}") from error
        return self._parse_score(answer)

    def _render_prompt(self, action: Any, observation: Any) -> str:
        """Return the model's prompt. Subclasses may override it."""
        return self.prompt_template.format(action=action, observation=observation)

    def _parse_score(self, response: str) -> float:
        """Return the score in an answer. Subclasses may override it."""
        if self.score_pattern is None:
            return self._read_score(response)
        match = re.search(self.score_pattern, response)
        try:
            score = float(match[1 if match.lastindex else 0] if match else "")
        except (TypeError, ValueError):  # no match, its first group is not in it, or it is not a number
            if self.default_score is None:
                raise LLMError(f"expected a score in the judge's answer, got {response[:200]!r}") from None
            return self.default_score
        return min(max(score, 0.0), 1.0) if self.normalize else score

    def _read_score(self, response: str) -> float:
        low, high = self.score_range
        try:
            score = _find_score(response)
        except ValueError:
            raise NoScoreError(
                f"the judge's answer has no score: expected one line, Score: NUMBER, got {response[-200:]!r}"
            ) from None
        if not low <= score <= high:
            raise NoScoreError(f"the judge's score {score:g} is outside of {low:g} to {high:g}")
        return score


def _find_score(answer: str) -> float:
    """Return the score of an answer that is `{"score": x}`, in a fence or not, or has one line `Score: x`.

    Raises:
        ValueError: There is none, or more than one.
    """
    fenced = _FENCE.fullmatch(answer.strip())
    try:
        document = from_json(fenced[1] if fenced else answer)
    except ValueError:
        (line,) = filter(None, (_SCORE_LINE.fullmatch(text.replace("*", "")) for text in answer.splitlines()))
        return float(line[1])
    score = document.get("score") if isinstance(document, dict) else None
    if isinstance(score, bool) or not isinstance(score, int | float):
        raise ValueError(f"expected a number as the score, got {score!r}")
    return float(score)
