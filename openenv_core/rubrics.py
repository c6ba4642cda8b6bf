"""Rubrics: scores of actions and observations, composed of smaller ones.

    class Legal(Rubric):
        def forward(self, action, observation):
            return float(observation.legal)

    rubric = Sequential(Gate(Legal()), WeightedSum([Solved(), Short()], [0.8, 0.2]))

An environment takes one (`Environment(rubric=...)`), and any callable of an action and an observation instead.
`forward` may be a coroutine function; a rubric in which nothing has to be awaited is called plainly, all others are
awaited.

A rubric made of others leaves their scores by path in the observation's metadata, under `rubric`.
"""

import asyncio
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
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from typing_extensions import TypeIs

from openenv_core.errors import LLMError

if TYPE_CHECKING:
    from openenv_core.llm_client import LLMClient

SCORES: Final = "rubric"
"""The key of an observation's metadata that has the scores of a rubric's parts, by path."""

Score: TypeAlias = float | Awaitable[float]
"""Of a rubric; awaited where a part of it is asynchronous."""

Hook: TypeAlias = Callable[["Rubric", Any, Any, float], object]
"""Told the rubric, the action, the observation and the score; may be a coroutine function."""

PreHook: TypeAlias = Callable[["Rubric", Any, Any], object]
"""Told the rubric, the action and the observation; likewise."""


class KnownScore(float):
    """A score that is there already, and may be awaited all the same: released containers give such as have to be."""

    def __await__(self) -> Generator[Any, Any, float]:
        yield from ()
        return float(self)


def is_pending(score: object) -> TypeIs[Awaitable[float]]:
    """Whether a score has yet to be awaited."""
    return inspect.isawaitable(score) and not isinstance(score, KnownScore)


_Steps: TypeAlias = Generator[Awaitable[Any], Any, float]


class Rubric(ABC):
    """Gives a score; rubrics among its attributes are its children.

    Attributes:
        last_score: What it gave last; None before the first call.
    """

    last_score: float | None = None
    _has_scored = False  # since a rubric around it was called

    @abstractmethod
    def forward(self, action: Any, observation: Any) -> Score:
        """Return the score of an action that led to an observation."""

    def __call__(self, action: Any, observation: Any) -> Score:
        """Score, and call the hooks. Returns an awaitable where any part of it is one."""
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
        if self._children:
            self._report(observation)
        for hook in self._forward_hooks:
            if inspect.isawaitable(pending := hook(self, action, observation, score)):
                yield pending
        return score

    def _report(self, observation: Any) -> None:
        """Leave the scores of the parts that were called; a rubric around this one does so after it, for more."""
        if isinstance(metadata := getattr(observation, "metadata", None), dict):
            scored = [
                (path, rubric.last_score) for path, rubric in self.named_rubrics() if rubric._has_scored
            ]
            metadata[SCORES] = {path: float(score) for path, score in scored if score is not None}

    def __new__(cls, *_: Any, **__: Any) -> "Rubric":
        """Be ready for children and hooks, whether or not a subclass calls `__init__`."""
        self = super().__new__(cls)
        object.__setattr__(self, "_children", {})
        object.__setattr__(self, "_forward_pre_hooks", [])
        object.__setattr__(self, "_forward_hooks", [])
        return self

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
        """Yield the rubrics that this one is made of."""
        yield from self._children.values()

    def named_children(self) -> Iterator[tuple[str, "Rubric"]]:
        """Yield them with the names of their attributes."""
        yield from self._children.items()

    def rubrics(self) -> Iterator["Rubric"]:
        """Yield all below this one."""
        yield from (rubric for _, rubric in self.named_rubrics())

    def named_rubrics(self, prefix: str = "") -> Iterator[tuple[str, "Rubric"]]:
        """Yield all below this one with their paths, as `outer.inner`."""
        for name, child in self._children.items():
            path = f"{prefix}.{name}" if prefix else name
            yield path, child
            yield from child.named_rubrics(path)

    def get_rubric(self, path: str) -> "Rubric":
        """Return the rubric at a path.

        Raises:
            KeyError: There is none.
        """
        rubric = self
        for name in path.split("."):
            if name not in rubric._children:
                raise KeyError(f"expected a rubric at {path!r}, got none called {name!r}")
            rubric = rubric._children[name]
        return rubric

    def reset(self) -> None:  # noqa: B027 - most keep nothing
        """Begin an episode. Whoever keeps something of it forgets that here."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a copy of it needs."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - likewise
        """Take over what `state_dict` returned."""


def _run(steps: _Steps) -> Score:
    """Take steps; from the first one on that has to be awaited, in a coroutine."""
    try:
        awaitable = next(steps)
    except StopIteration as done:
        score: float = done.value
        return score
    return _resume(steps, awaitable)


async def _resume(steps: _Steps, awaitable: Awaitable[Any]) -> float:
    while True:
        try:
            try:
                value = await awaitable
            except BaseException as error:
                awaitable = steps.throw(error)
            else:
                awaitable = steps.send(value)
        except StopIteration as done:
            score: float = done.value
            return score


async def _gather(scores: Sequence[Awaitable[float]]) -> list[float]:
    """Await scores together. Where one fails, none goes on behind the caller's back."""
    tasks = [asyncio.ensure_future(score) for score in scores]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Combination(Rubric):
    """A rubric that combines the scores of others, which may be awaitable."""

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
        """Yield what has to be awaited, and return the score."""


class Sequential(_Combination):
    """One after the other: 0 as soon as one gives 0, otherwise the score of the last; 1 where there is none."""

    def __init__(self, *rubrics: Rubric) -> None:
        super().__init__(rubrics)

    def _combine(self, action: Any, observation: Any) -> _Steps:
        score = 1.0
        for rubric in self._rubrics:
            child_score = rubric(action, observation)
            score = (yield child_score) if is_pending(child_score) else child_score
            if score == 0.0:
                break
        return score

    def __len__(self) -> int:
        return len(self._rubrics)

    def __getitem__(self, index: int) -> Rubric:
        return self._rubrics[index]


class Gate(_Combination):
    """The score of a rubric, and 0 where that is below a threshold."""

    def __init__(self, rubric: Rubric, threshold: float = 1.0) -> None:
        super().__init__(())
        self.rubric = rubric
        self.threshold = threshold

    def _combine(self, action: Any, observation: Any) -> _Steps:
        child_score = self.rubric(action, observation)
        score: float = (yield child_score) if is_pending(child_score) else child_score
        return score if score >= self.threshold else 0.0


class WeightedSum(_Combination):
    """The sum of scores by weights, which sum to 1. What has to be awaited is awaited together.

    Raises:
        ValueError: The weights are not as many as the rubrics, or sum to something else.
    """

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
        """A copy of them."""
        return list(self._weights)

    def _combine(self, action: Any, observation: Any) -> _Steps:
        child_scores = [rubric(action, observation) for rubric in self._rubrics]
        waiting = [each for each in child_scores if is_pending(each)]
        awaited = iter((yield _gather(waiting)) if waiting else ())
        scores = [next(awaited) if is_pending(each) else each for each in child_scores]
        return math.fsum(weight * score for weight, score in zip(self._weights, scores, strict=True))


class RubricList(Rubric):
    """Rubrics by number, for a rubric around them that says what becomes of their scores."""

    def __init__(self, rubrics: Iterable[Rubric] = ()) -> None:
        self._rubrics: list[Rubric] = []
        self.extend(rubrics)

    def forward(self, action: Any, observation: Any) -> Score:
        """It has no score of its own."""
        raise NotImplementedError("a RubricList has no score; call the rubrics in it")

    def append(self, rubric: Rubric) -> None:
        """Add one."""
        self._children[f"rubric_{len(self._rubrics)}"] = rubric
        self._rubrics.append(rubric)

    def extend(self, rubrics: Iterable[Rubric]) -> None:
        """Add several."""
        for rubric in rubrics:
            self.append(rubric)

    def __len__(self) -> int:
        return len(self._rubrics)

    def __getitem__(self, index: int) -> Rubric:
        return self._rubrics[index]

    def __iter__(self) -> Iterator[Rubric]:
        return iter(self._rubrics)


class RubricDict(Rubric, Mapping[str, Rubric]):
    """Rubrics by name, likewise: one a game, for example."""

    __hash__ = object.__hash__

    def __init__(self, rubrics: Mapping[str, Rubric] | None = None) -> None:
        self.update(rubrics or {})

    def forward(self, action: Any, observation: Any) -> Score:
        """It has no score of its own."""
        raise NotImplementedError("a RubricDict has no score; call the rubrics in it")

    def update(self, rubrics: Mapping[str, Rubric]) -> None:
        """Add several, or replace them."""
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
    """Scores an episode as a whole, at its end; until then each step earns `intermediate_reward`."""

    def __init__(self, intermediate_reward: float = 0.0) -> None:
        self.intermediate_reward = intermediate_reward
        self._trajectory: list[tuple[Any, Any]] = []

    @abstractmethod
    def score_trajectory(self, trajectory: list[tuple[Any, Any]]) -> float:
        """Return the score of an episode, given as its actions and observations."""

    @abstractmethod
    def compute_step_rewards(self) -> list[float]:
        """Return what of the score each step of the episode so far is credited with."""

    @property
    def trajectory(self) -> list[tuple[Any, Any]]:
        """A copy of the episode so far."""
        return list(self._trajectory)

    def forward(self, action: Any, observation: Any) -> Score:
        """See `Rubric.forward`."""
        self._trajectory.append((action, observation))
        if getattr(observation, "done", False):
            return self.score_trajectory(self._trajectory)
        return self.intermediate_reward

    def reset(self) -> None:
        """Forget the episode."""
        self._trajectory = []

    def state_dict(self) -> dict[str, Any]:
        """See `Rubric.state_dict`."""
        return {"intermediate_reward": self.intermediate_reward}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Rubric.load_state_dict`."""
        self.intermediate_reward = state.get("intermediate_reward", self.intermediate_reward)


class ExponentialDiscountingTrajectoryRubric(TrajectoryRubric):
    """Credits a step with gamma to the number of steps behind it, of T in all: r_t = gamma^(T-1-t) R.

    Args:
        gamma: 0 credits the last step alone, 1 all of them alike.
        intermediate_reward: See `TrajectoryRubric`.

    Raises:
        ValueError: Gamma is outside of 0 to 1.
    """

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

    def state_dict(self) -> dict[str, Any]:
        """See `Rubric.state_dict`."""
        return {**super().state_dict(), "gamma": self.gamma}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Rubric.load_state_dict`."""
        super().load_state_dict(state)
        self.gamma = state.get("gamma", self.gamma)


class LLMJudge(Rubric):
    """Asks a language model, and reads the score in its answer.

    What is judged stands in the prompt, so a policy can talk to the judge: ask for a form of answer that what you show
    it does not have, and read it with `score_pattern`.

    Args:
        prompt_template: With `{action}` and `{observation}`, as `str.format` fills them in.
        client: Of the model; `openenv_core.llm_client.OpenAIClient` for one.
        score_pattern: Regular expression that finds the score, in its first group where it has one; by default the
            first number.
        default_score: What an answer without a score is worth; None raises.
        normalize: Bring scores below 0 to 0, and those above 1 to 1.
        timeout_s: Seconds until there must be an answer.

    Raises:
        LLMError: When called: the model cannot be reached, fails, or does not answer in time. It is the
            infrastructure's failure, and no score.
    """

    def __init__(
        self,
        prompt_template: str,
        client: "LLMClient",
        *,
        score_pattern: str | None = None,
        default_score: float | None = 0.0,
        normalize: bool = True,
        timeout_s: float = 60.0,
    ) -> None:
        self.prompt_template = prompt_template
        self._client = client
        self._score_pattern = re.compile(score_pattern or r"(\d+\.?\d*)")
        self.default_score = default_score
        self.normalize = normalize
        self.timeout_s = timeout_s

    async def forward(self, action: Any, observation: Any) -> float:
        """See `Rubric.forward`.

        Raises:
            LLMError: The model has given no answer in time, or none with a score.
        """
        prompt = self._render_prompt(action, observation)
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
        match = self._score_pattern.search(response)
        try:
            score = float(match[1 if match.lastindex else 0]) if match else self.default_score
        except ValueError:  # the pattern has found something else
            score = self.default_score
        if score is None:
            raise LLMError(f"expected a score in the judge's answer, got {response[:200]!r}")
        return min(max(score, 0.0), 1.0) if match and self.normalize else score

    def state_dict(self) -> dict[str, Any]:
        """See `Rubric.state_dict`."""
        names = ("prompt_template", "default_score", "normalize", "timeout_s")
        return {"score_pattern": self._score_pattern.pattern, **{name: getattr(self, name) for name in names}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Rubric.load_state_dict`."""
        for name in self.state_dict().keys() & state.keys():
            if name == "score_pattern":
                self._score_pattern = re.compile(state[name])
            else:
                setattr(self, name, state[name])
