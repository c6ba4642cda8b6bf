"""Rubrics: composed scores, sync and async, with hooks."""

import asyncio
import re
from threading import Event
from typing import Any

import pytest
from chat_server import chat_server
from serving import serving

from openenv_core import (
    Action,
    Environment,
    GenericEnvClient,
    Observation,
    State,
    infrastructure_failure,
    unscored_reason,
)
from openenv_core.errors import LLMError
from openenv_core.llm_client import OpenAIClient
from openenv_core.rubrics import (
    SCORES,
    ExponentialDiscountingTrajectoryRubric,
    Gate,
    LLMJudge,
    Rubric,
    RubricDict,
    RubricList,
    Sequential,
    TrajectoryRubric,
    WeightedSum,
)


class Given(Rubric):
    def __init__(self, score: float) -> None:
        self.score = score
        self.call_count = 0

    def forward(self, action: Any, observation: Any) -> float:
        self.call_count += 1
        return self.score


class Awaited(Given):
    async def forward(self, action: Any, observation: Any) -> float:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().forward(action, observation)


class Meeting(Given):
    def __init__(self, score: float, barrier: asyncio.Barrier) -> None:
        super().__init__(score)
        self.barrier = barrier

    async def forward(self, action: Any, observation: Any) -> float:  # type: ignore[override]
        async with asyncio.timeout(60):
            await self.barrier.wait()
        return self.score


class Won(ExponentialDiscountingTrajectoryRubric):
    def score_trajectory(self, trajectory: list[tuple[Any, Any]]) -> float:
        return float(trajectory[-1][1].won)


class Seen:
    def __init__(self, *, done: bool = False, won: bool = False) -> None:
        self.done, self.won = done, won


def test_sync_rubrics_return_plain_scores() -> None:
    last = Given(0.5)
    assert Sequential()(0, 0) == 1.0
    assert Sequential(Given(1.0), Gate(Given(0.7), threshold=0.7), last)(0, 0) == 0.5
    assert Sequential(Gate(Given(0.7)), last)(0, 0) == 0.0
    assert str(Sequential(Gate(Given(float("nan"))), last)(0, 0)) == "nan"  # hidden by neither
    assert last.call_count == 1
    assert WeightedSum([Given(1.0), Given(0.5)], [0.2, 0.8])(0, 0) == pytest.approx(0.6)
    for weights in ([0.5], [0.5, 0.6]):
        with pytest.raises(ValueError, match="weights must"):
            WeightedSum([last, last], weights)
    for holder in (RubricList([last]), RubricDict({"one": last})):
        with pytest.raises(NotImplementedError):
            holder(0, 0)


async def test_async_part_makes_the_rubric_async_and_is_called_once() -> None:
    parts = [Given(1.0), Awaited(0.9), Given(0.8), Awaited(0.7)]
    known = Sequential(Gate(Given(1.0)), Given(0.5))(0, 0)
    assert known == await known == 0.5  # type: ignore[misc]
    score = Sequential(*parts)(0, 0)
    assert await score == 0.7  # type: ignore[misc]
    assert [part.call_count for part in parts] == [1] * 4
    barrier = asyncio.Barrier(2)
    both = WeightedSum([Meeting(1.0, barrier), Given(1.0), Meeting(0.0, barrier)], [0.5, 0.25, 0.25])
    assert await both(0, 0) == pytest.approx(0.75)  # type: ignore[misc]

    class Fails(Awaited):
        async def forward(self, action: Any, observation: Any) -> float:  # type: ignore[override]
            raise RuntimeError("the judge is gone")

    with pytest.raises(RuntimeError, match="the judge is gone"):
        await Sequential(Given(1.0), Fails(1.0))(0, 0)  # type: ignore[misc]


async def test_hooks_run_before_and_after_each_call() -> None:
    calls: list[Any] = []

    async def later(*told: Any) -> None:
        await asyncio.sleep(0)
        calls.append(told[1:])

    rubric = Given(0.5)
    rubric.register_forward_pre_hook(lambda *told: calls.append((*told[1:], rubric.call_count)))
    rubric.register_forward_hook(lambda *told: calls.append(told[1:]))
    assert rubric("act", "see") == rubric.last_score == 0.5
    assert calls == [("act", "see", 0), ("act", "see", 0.5)]
    rubric.register_forward_hook(later)
    assert await rubric("act", "see") == 0.5  # type: ignore[misc]
    assert calls[-1] == ("act", "see", 0.5)


def test_nested_rubrics_are_found_by_path() -> None:
    inner = Sequential(Gate(Given(1.0)), Given(0.5))
    outer = RubricDict({"game": inner})
    assert [path for path, _ in outer.named_rubrics()] == [
        "game",
        "game.rubric_0",
        "game.rubric_0.rubric",
        "game.rubric_1",
    ]
    assert outer.get_rubric("game.rubric_1") is inner[1]
    with pytest.raises(KeyError, match=r"no rubric at 'game.rubric_2'"):
        outer.get_rubric("game.rubric_2")


def test_episode_is_scored_at_its_end_and_credited_by_discount() -> None:
    rubric = Won(gamma=0.5, intermediate_reward=0.1)
    assert [rubric(0, Seen()), rubric(0, Seen()), rubric(0, Seen(done=True, won=True))] == [0.1, 0.1, 1.0]
    assert rubric.compute_step_rewards() == [0.25, 0.5, 1.0]
    rubric.reset()
    assert (rubric.trajectory, rubric.compute_step_rewards()) == ([], [])
    other = Won()
    other.load_state_dict(rubric.state_dict())
    assert (other.gamma, other.intermediate_reward) == (0.5, 0.1)
    with pytest.raises(ValueError, match="expected a gamma from 0 to 1"):
        Won(gamma=1.5)


class Values(TrajectoryRubric):
    """The sum of an episode's values."""

    def score_trajectory(self, trajectory: list[tuple[Any, Any]]) -> float:
        return float(sum(observation.value for _, observation in trajectory))

    def compute_step_rewards(self) -> list[float]:
        return []


class Holder(Rubric):
    """Overrides the life-cycle methods without calling those of `Rubric`, as in the released package."""

    def __init__(self, *rubrics: Rubric) -> None:
        self.first = rubrics[0]
        self.listed = list(rubrics)
        self.named = {f"{number}": rubric for number, rubric in enumerate(rubrics)}
        self.resets = 0

    def forward(self, action: Any, observation: Any) -> float:
        return float(self.listed[-1](action, observation))  # type: ignore[arg-type]

    def reset(self) -> None:
        self.resets += 1

    def state_dict(self) -> dict[str, Any]:
        return {"resets": self.resets}

    def load_state_dict(self, state: Any) -> None:
        (self.resets,) = state.values()


class Plain:
    """Has a method of a rubric's life cycle, and is none."""

    def reset(self) -> None:
        pass


class Mixed(Plain, Holder):
    pass


class Weighted(Rubric):
    def __init__(self, rubric: Rubric) -> None:
        self.parts = {"style": [None, (0.0, Given(0.0))], "content": [(1.0, rubric)]}

    def forward(self, action: Any, observation: Any) -> float:
        ((weight, rubric),) = self.parts["content"]  # type: ignore[misc]
        return weight * float(rubric(action, observation))  # type: ignore[arg-type]


class Step(Observation):
    value: int = 1


@pytest.mark.parametrize(
    "enclose",
    [
        Gate,
        Sequential,
        lambda rubric: WeightedSum([rubric], [1.0]),
        lambda rubric: Sequential(Gate(Sequential(rubric))),
        Holder,
        lambda rubric: Holder(Given(0.0), rubric),
        lambda rubric: Holder(RubricList([Given(0.0), rubric])[1]),
        lambda rubric: Holder(Given(0.0), Holder(Given(0.0), rubric)),
        lambda rubric: Mixed(Given(0.0), rubric),
        Weighted,
    ],
)
@pytest.mark.parametrize("is_async", [False, True])
async def test_every_part_is_reset_with_the_whole(enclose: Any, is_async: bool) -> None:
    environment = Essay(rubric=enclose(Values(intermediate_reward=1.0)))
    scores = []
    for _ in range(3):
        if is_async:
            await environment._reset_rubric_async()
        else:
            environment._reset_rubric()
        environment._apply_rubric(Action(), Step())
        scores.append(environment._apply_rubric(Action(), Step(done=True)))
    assert scores == [2.0] * 3


async def test_parts_are_reset_by_their_own_asynchronous_method() -> None:
    class Session(Given):
        async def reset_async(self) -> None:
            self.call_count = 0

    part = Session(1.0)
    environment = Essay(rubric=Sequential(Gate(part)))
    environment._apply_rubric(Action(), Observation())
    await environment._reset_rubric_async()
    assert part.call_count == 0


def test_state_of_every_part_is_restored() -> None:
    def compose(gamma: float, threshold: float, weights: list[float]) -> Holder:
        return Holder(Given(0.0), Gate(WeightedSum([Won(gamma), Given(0.0)], weights), threshold))

    rubric, other = compose(0.5, 0.75, [0.5, 0.5]), compose(0.25, 1.0, [1.0, 0.0])
    rubric.reset()
    other.load_state_dict(state := rubric.state_dict())
    assert other.state_dict() == state
    assert state["resets"] == 1
    gamma = {path: value for path, value in state.items() if path.endswith("rubric.rubric_0.gamma")}
    assert set(gamma.values()) == {0.5}


def test_observation_that_is_used_again_keeps_its_values_in_the_trajectory() -> None:
    rubric, observation = Values(), Step()
    for value in (1, 2, 3):
        observation.value, observation.done = value, value == 3
        observation.reward = rubric(Action(), observation)  # type: ignore[assignment]
    assert observation.reward == 6.0


def test_trajectory_has_the_rewards_that_the_environment_set_after_scoring() -> None:
    class Earned(Values):
        def score_trajectory(self, trajectory: list[tuple[Any, Any]]) -> float:
            return float(sum(observation.reward or 0.0 for _, observation in trajectory))

    rubric = Earned()
    for reward in (1.0, 2.0):
        observation = Step()
        rubric(Action(), observation)
        observation.reward = reward
    assert rubric(Action(), Step(done=True)) == 3.0


def test_scores_of_the_parts_that_were_called_are_left_in_the_observation() -> None:
    class Whole(Rubric):
        def __init__(self) -> None:
            self.legal = Given(1.0)
            self.style = Sequential(Given(0.0), Given(0.5))
            self.idle = Given(0.25)

        def forward(self, action: Any, observation: Any) -> float:
            return float(self.legal(action, observation)) + float(self.style(action, observation))

    rubric = Whole()
    rubric.idle(0, 0)
    seen = Observation()
    assert rubric(Action(), seen) == 1.0
    assert seen.metadata[SCORES] == {"legal": 1.0, "style": 0.0, "style.rubric_0": 0.0}
    bare = Observation()
    Given(1.0)(Action(), bare)
    assert bare.metadata == {}


class Essay(Environment[Action, Observation, State]):
    """Judged by a model, with a gate before it."""

    def reset(self) -> Observation:
        return Observation()

    async def step(self, action: Action) -> Observation:
        observation = Observation(done=True)
        observation.reward = await self._apply_rubric_async(action, observation)
        return observation

    @property
    def state(self) -> State:
        return State()


async def test_judge_scores_over_http_and_an_unreachable_one_gives_no_score() -> None:
    from servers import create_app

    with chat_server("I give it 0.8.", "", 401) as server:
        client = OpenAIClient("http://127.0.0.1", server.port, "m")

        def essay() -> Essay:
            judge = LLMJudge("{action.metadata[text]}? {observation.done}", client, default_score=None)
            return Essay(rubric=Sequential(Gate(Given(1.0)), WeightedSum([judge, Given(1.0)], [0.5, 0.5])))

        app = create_app(essay, Action, Observation)
        async with serving(app) as address, GenericEnvClient(f"http://{address}") as env:
            results = []
            for _ in range(3):
                await env.reset()
                results.append(await env.step({"metadata": {"text": "Once"}}))
    judged, unread, refused = results
    assert (judged.reward, judged.infrastructure_error) == (pytest.approx(0.9), None)
    assert judged.metadata[SCORES]["rubric_1.rubric_0"] == 0.8
    assert server.requests[0]["messages"] == [{"role": "user", "content": "Once? True"}]
    for result, expected in (
        (unread, "expected a score in the judge's answer"),
        (refused, "see the value of api_key"),
    ):
        assert result.reward is None
        assert expected in str(result.infrastructure_error)


async def test_late_or_broken_judge_fails_and_leaves_nothing_running() -> None:
    release = Event()
    with chat_server(release) as server:
        client = OpenAIClient("http://127.0.0.1", server.port, "m")
        late = LLMJudge("?", client, timeout_s=0.05)
        waiting = LLMJudge("?", client)
        before = asyncio.all_tasks()
        with pytest.raises(LLMError, match=r"within 0\.05 s"):
            await WeightedSum([late, waiting], [0.5, 0.5])(0, 0)  # type: ignore[misc]
        assert asyncio.all_tasks() == before
        release.set()
    broken = LLMJudge("{action}", object())  # type: ignore[arg-type]
    with pytest.raises(LLMError, match="got AttributeError"):
        await broken(0, 0)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("answer", "options", "score"),
    [
        ("8 of 10", {"default_score": 0.0}, 1.0),
        ("8 of 10", {"default_score": None, "normalize": False}, 8.0),
        ("none", {"score_pattern": r"\d"}, 0.0),
        ("none", {"default_score": -1.0}, -1.0),
        ("[7/10] 3", {"score_pattern": r"\[(\d+)/10\]", "normalize": False}, 7.0),
        ("good", {"score_pattern": "good", "default_score": -1.0}, -1.0),
        ("4 of 5", {"score_pattern": r"score (\d)|(\d) of 5", "default_score": 0.5}, 0.5),
    ],
)
def test_scores_are_read_by_pattern(answer: str, options: dict[str, Any], score: float) -> None:
    judge = LLMJudge("?", object(), **options)  # type: ignore[arg-type]
    assert judge._parse_score(answer) == score
    other = LLMJudge("!", object())  # type: ignore[arg-type]
    other.load_state_dict(judge.state_dict())
    assert (other._parse_score(answer), other.prompt_template) == (score, "?")


@pytest.mark.parametrize(
    ("answer", "score"),
    {
        "Step 1 fails.\nScore: 0": 0.0,
        "score:1e-3\n": 0.001,
        "**Score:** .5": 0.5,
        "Score: 1": 1.0,
        '{"reason": "good", "score": 0.25}': 0.25,
        '```json\n{"score": 1}\n```': 1.0,
    }.items(),
)
def test_score_is_read_in_the_format(answer: str, score: float) -> None:
    judge = LLMJudge("?", object())  # type: ignore[arg-type]
    assert judge._parse_score(answer) == score


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "Score: -3",
        "7/10",
        ".5",
        "1e-3",
        "0,5",
        "Score: 0,5",
        "Score: 7/10",
        "Score: nan",
        "Step 1 fails. Score: 0",
        "Score: 0\nScore: 1",
        '{"score": 1.5}',
        '{"score": "1"}',
        '{"score": true}',
        '{"reason": "Score: 1"}',
        "[" * 999,
    ],
)
def test_answer_without_a_score_in_the_format_and_range_has_none(answer: str) -> None:
    judge = LLMJudge("?", object())  # type: ignore[arg-type]
    with pytest.raises(LLMError):
        judge._parse_score(answer)


def test_range_of_scores_is_the_judges_own() -> None:
    judge = LLMJudge("?", object(), score_range=(-1, 10))  # type: ignore[arg-type]
    other = LLMJudge("!", object(), default_score=0.0)  # type: ignore[arg-type]
    other.load_state_dict(judge.state_dict())
    assert other._parse_score("Score: 7") == 7.0
    with pytest.raises(LLMError, match="the judge's score 11 is outside of -1 to 10"):
        other._parse_score("Score: 11")
    for options in ({"score_range": (1, 1)}, {"score_range": (0, 10), "score_pattern": r"\d"}):
        with pytest.raises(ValueError, match="expected a score_range from low to high"):
            LLMJudge("?", object(), **options)  # type: ignore[arg-type]
    with pytest.raises(re.error):
        LLMJudge("?", object(), score_pattern="(")  # type: ignore[arg-type]


async def test_judge_is_asked_for_the_format_and_an_answer_without_a_score_is_unscored() -> None:
    with chat_server("Fine.\nScore: 8", "I give it 0.8.") as server:
        client = OpenAIClient("http://127.0.0.1", server.port, "m")
        judge = LLMJudge("Rate it.", client, score_range=(0, 10))
        essay = Essay(rubric=Sequential(Gate(Given(1.0)), WeightedSum([judge], [1.0])))
        rated, unrated = await essay.step(Action()), await essay.step(Action())
    (message,) = server.requests[0]["messages"]
    assert message["content"] == (
        "Rate it.\n\nEnd your answer with one line, Score: NUMBER, where NUMBER is from 0 to 10."
    )
    assert rated.reward == 8.0
    assert (unrated.reward, infrastructure_failure(unrated)) == (None, None)
    assert "the judge's answer has no score" in str(unscored_reason(unrated))
