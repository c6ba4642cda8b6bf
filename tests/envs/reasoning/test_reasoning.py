"""Questions of reasoning-gym through a real server, and the options of a reset."""

from collections.abc import Iterator
from typing import Any

import pytest
import reasoning_gym

from envs.reasoning_env import InvalidResetOptionError, ReasoningAction, ReasoningEnv
from envs.reasoning_env.server.environment import REFUSED, ReasoningEnvironment
from openenv_core import ExecutionError, GenericEnvClient

SUMS: dict[str, Any] = {"dataset_name": "chain_sum", "dataset_config": {"max_terms": 2, "max_digits": 1}}
ANSWER = ReasoningAction(answer="0")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ReasoningEnv.from_process() as client:
        yield client.base_url


def test_an_episode_over_the_wire_has_the_fields_of_the_released_environment(url: str) -> None:
    """OpenEnv's client sends `answer` and reads these fields. It is in OpenEnv's repository, not in its wheel."""
    dataset = reasoning_gym.create_dataset("chain_sum", seed=42, size=2, max_terms=2, max_digits=1)
    with GenericEnvClient(base_url=url).sync() as client:
        for index in (0, 1, 0):  # the next one, then the first again
            options = {**SUMS, "seed": 42, "size": 2} if not client.state()["step_count"] else {}
            begun = client.reset(**options)
            entry = dataset[index]
            empty = {"score": None, "correct_answer": None, "dataset_metadata": None, "metadata": {}}
            assert begun.observation == {"question": entry["question"], **empty}
            ended = client.step({"answer": entry["answer"]})
            assert (ended.reward, ended.done) == (1.0, True)
            metadata = ended.observation.pop("dataset_metadata")
            assert metadata["source_dataset"] == "chain_sum"
            assert ended.observation == {
                "question": None,
                "score": 1.0,
                "correct_answer": entry["answer"],
                "metadata": {},
            }
        with pytest.raises(ExecutionError, match="call reset"):
            client.step({"answer": "1"})


def test_splits_share_no_question_even_of_a_data_set_with_few() -> None:
    world = ReasoningEnvironment()
    # 200 sums and differences of two digits, each of which is asked again and again.
    asked = {
        split: {world.reset(seed=seed, split=split, **SUMS).question for seed in range(400)}
        for split in ("train", "validation", "test")
    }
    train, validation, test = asked.values()
    assert train.isdisjoint(validation | test)
    assert validation.isdisjoint(test)
    assert len(train) > 100
    assert min(len(validation), len(test)) > 8
    assert world.reset(seed=5, split="test", **SUMS) == world.reset(seed=5, split="test", **SUMS)


def test_difficulty_is_a_level_of_the_curriculum_and_the_configuration_precedes_it() -> None:
    world = ReasoningEnvironment()

    def longest(**options: Any) -> int:
        return max(
            len(world.reset(seed=seed, dataset_name="chain_sum", **options).question or "")
            for seed in range(50)
        )

    easy = longest(difficulty=0)
    assert easy < longest(difficulty=3)
    assert longest(difficulty=3, dataset_config={"max_terms": 2, "max_digits": 2}) <= easy + 5


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dataset_name": "no_such"}, "expected a data set of reasoning-gym, got 'no_such'"),
        ({"dataset_name": "composite"}, "expected dataset_specs"),
        ({"dataset_specs": [{"name": "gcd"}]}, "expected dataset_specs"),
        ({"dataset_config": {"min_legs": 2}}, "expected a configuration that 'leg_counting' can ask from"),
        ({"dataset_config": {"min_animals": 9, "max_animals": 2}}, "max_animals must be"),
        (
            {"dataset_name": "spell_backward", "dataset_config": {"data_file": "/etc/passwd"}},
            "without data_file",
        ),
        ({"dataset_config": {"seed": 1}}, "without seed"),
        ({"split": "dev"}, "split"),
        ({"difficulty": -1}, "difficulty"),
        ({"size": 0}, "size"),
        ({"seed": 2**63}, "below 2"),
        ({"colour": 1}, "colour"),
        ({"dataset_name": "gsm_symbolic", "difficulty": 1}, "has no curriculum"),
        *(({"dataset_name": name}, "evaluates answers as Python") for name in sorted(REFUSED)),
        (
            {"dataset_name": "composite", "dataset_specs": [{"name": "puzzle24"}]},
            "evaluates answers as Python",
        ),
    ],
)
def test_an_invalid_reset_is_an_error_and_the_episode_continues(options: dict[str, Any], reason: str) -> None:
    world = ReasoningEnvironment()
    world.reset(seed=1)
    before = world.state
    with pytest.raises(InvalidResetOptionError, match=reason):
        world.reset(**options)
    assert world.state == before
    assert world.step(ANSWER).done


def test_a_composite_asks_from_all_of_its_data_sets() -> None:
    world = ReasoningEnvironment()
    specs = [{"name": "leg_counting", "weight": 2}, {"name": "gcd", "config": {"max_value": 9}}]
    sources = set()
    for seed in range(20):
        world.reset(seed=seed, dataset_name="composite", dataset_specs=specs)
        sources.add((world.step(ANSWER).dataset_metadata or {})["source_dataset"])
    assert sources == {"leg_counting", "gcd"}


def test_an_answer_that_a_verifier_cannot_read_scores_nothing() -> None:
    world = ReasoningEnvironment()
    world.reset(seed=3, dataset_name="prime_factorization")
    assert world.step(ReasoningAction(answer="ééé")).reward == 0.0
