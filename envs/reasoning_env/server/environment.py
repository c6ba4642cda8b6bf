"""Questions of reasoning-gym, one per episode, scored by its verifiers."""

import json
import random
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Annotated, Any, Final
from uuid import uuid4
from zlib import crc32

from pydantic import BaseModel, ConfigDict, Field

from openenv_core import Environment, EnvironmentMetadata
from openenv_core.errors import EpisodeOverError
from openenv_core.tasks import InvalidResetOptionError, check_reset, draw_seed, read_reset

from ..models import ReasoningAction, ReasoningObservation, ReasoningState, Split

# Imported by the first session, since it takes seconds. A server without it does not start.
if find_spec("reasoning_gym") is None:
    raise ModuleNotFoundError("No module named 'reasoning_gym'", name="reasoning_gym")

REFUSED: Final = frozenset(
    {
        "binary_matrix",
        "countdown",
        "intermediate_integration",
        "n_queens",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
        "spiral_matrix",
        "string_insertion",
    }
)
"""Data sets whose verifiers evaluate the answer as Python, so that an answer could run code on the server."""

_MAX_DRAWS: Final = 1000
_MAX_SEED: Final = 2**63


def split_of(question: str) -> Split:
    """Return the split of a question. Its text decides, so no question is in two splits, whatever it was drawn by."""
    tenth = crc32(question.encode()) % 10
    return "train" if tenth < 8 else "validation" if tenth == 8 else "test"


class DatasetSpec(BaseModel):
    """One data set of a composite: its configuration, and its share of the questions."""

    model_config = ConfigDict(extra="forbid")

    name: str
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    config: dict[str, Any] = {}


class ResetOptions(BaseModel):
    """The options of a reset, without seed and episode_id; see `ReasoningEnvironment.reset`."""

    model_config = ConfigDict(extra="forbid")

    dataset_name: str = "leg_counting"
    dataset_config: dict[str, Any] = {}
    dataset_specs: list[DatasetSpec] = []
    size: Annotated[int, Field(ge=1, le=100_000, strict=True)] = 500
    split: Split | None = None
    difficulty: Annotated[int, Field(ge=0, strict=True)] | None = None


class ReasoningEnvironment(Environment[ReasoningAction, ReasoningObservation, ReasoningState]):
    """One question of a reasoning-gym data set per episode; the step is the answer.

    A reset with a seed determines the question. It is not declared deterministic, since clients would then add a seed
    to every reset, and none could ask the next question.
    """

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        # Costs seconds, which should pass before the first reset's deadline begins.
        import reasoning_gym  # noqa: F401

        self._options = ResetOptions()
        self._dataset: Any = None
        self._entry: dict[str, Any] = {}
        self._state = ReasoningState()

    def reset(
        self,
        *,
        seed: int | None = None,
        episode_id: str | None = None,
        dataset_name: str | None = None,
        dataset_config: Mapping[str, Any] | None = None,
        dataset_specs: list[Mapping[str, Any]] | None = None,
        size: int | None = None,
        split: str | None = None,
        difficulty: int | None = None,
        **unknown: Any,
    ) -> ReasoningObservation:
        """Ask a question. A reset without a seed and options asks the next one after the previous reset's seed.

        Args:
            seed: Selects the question, together with the options; None draws a seed, which `state` reports.
            episode_id: The caller's name for the episode; None generates a uuid4.
            dataset_name: A data set of reasoning-gym, leg_counting by default, or "composite".
            dataset_config: Fields of the data set's configuration.
            dataset_specs: The data sets of a composite: `name`, `weight` and `config` of each.
            size: The number of questions after which the next one is the first again.
            split: train, validation or test, which share no question. None asks the questions that reasoning-gym itself
                generates for the seed.
            difficulty: The level of all attributes of the data set's curriculum, from 0; `dataset_config` precedes it.
            **unknown: Rejected.

        Raises:
            InvalidResetOptionError: An option is unknown, or a value invalid. The current episode continues.
        """
        check_reset(("seed", "episode_id", *ResetOptions.model_fields), unknown, seed, episode_id)
        given = {
            "dataset_name": dataset_name,
            "dataset_config": dataset_config,
            "dataset_specs": dataset_specs,
            "size": size,
            "split": split,
            "difficulty": difficulty,
        }
        state = self._state
        if state.seed is not None and seed is None and all(value is None for value in given.values()):
            options, seed, index = self._options, state.seed, (state.index + 1) % self._options.size
        else:
            options, index = read_reset(ResetOptions, given), 0
            seed = draw_seed() if seed is None else seed
            if seed >= _MAX_SEED:
                raise InvalidResetOptionError(f"expected a seed below 2^63, got {seed}")
        try:
            self._dataset, self._entry = draw_entry(options, seed, index)
        except InvalidResetOptionError:
            raise
        except Exception as error:
            # Data sets check their configurations by assertions, or not at all until the first question.
            reason = f"{type(error).__name__}: {error}"
            raise InvalidResetOptionError(
                f"expected a configuration that {options.dataset_name!r:.60} can ask from, got {reason:.300}"
            ) from error
        self._options = options
        self._state = ReasoningState(
            episode_id=str(uuid4()) if episode_id is None else episode_id,
            dataset_name=options.dataset_name,
            seed=seed,
            index=index,
            split=options.split,
        )
        return ReasoningObservation(question=self._entry["question"])

    def step(self, action: ReasoningAction) -> ReasoningObservation:
        """Score the answer, which ends the episode. The reward is the score, or the rubric's if there is one.

        Raises:
            EpisodeOverError: There is no question, or it was answered.
        """
        state = self._state
        if state.seed is None or state.done:
            raise EpisodeOverError(
                "expected reset() before an answer, got step(); call reset() for a question"
            )
        try:
            score = float(self._dataset.score_answer(action.answer, self._entry))
        except Exception:
            # Some verifiers fail on what they cannot parse.
            score = 0.0
        state.step_count, state.done = 1, True
        # Metadata may hold values that JSON has no form for, such as dates.
        metadata = json.loads(json.dumps(self._entry.get("metadata", {}), default=str, skipkeys=True))
        answer = self._entry["answer"]
        observation = ReasoningObservation(
            done=True,
            reward=score,
            score=score,
            correct_answer=None if answer is None else str(answer),
            dataset_metadata=metadata,
        )
        if self.rubric is not None:
            observation.reward = self._apply_rubric(action, observation)
        return observation

    @property
    def state(self) -> ReasoningState:
        """A copy of the episode's state, so that callers cannot change it."""
        return self._state.model_copy()

    def get_metadata(self) -> EnvironmentMetadata:
        """Return the environment's name and description."""
        return EnvironmentMetadata(
            name="reasoning", description="A question of a reasoning-gym data set, scored by its verifier."
        )


def draw_entry(options: ResetOptions, seed: int, index: int) -> tuple[Any, dict[str, Any]]:
    """Return a question, and the data set that it is from.

    Raises:
        InvalidResetOptionError: See `make_dataset`; or the split has no question, or too few to be found.
    """
    if options.split is None:
        dataset = make_dataset(options, seed, options.size)
        return dataset, dataset[index]
    draws = random.Random(f"{options.split} {seed} {index}")
    for _ in range(_MAX_DRAWS):
        dataset = make_dataset(options, draws.getrandbits(31), 1)
        entry = dataset[0]
        if split_of(entry["question"]) == options.split:
            return dataset, entry
    raise InvalidResetOptionError(
        f"expected a configuration with questions in the split {options.split!r}, got none in {_MAX_DRAWS} draws"
    )


def make_dataset(options: ResetOptions, seed: int, size: int) -> Any:
    """Make the data set that the options describe.

    Raises:
        InvalidResetOptionError: There is no such data set, or it is refused, or an option does not apply to it.
    """
    from reasoning_gym import composite, create_dataset
    from reasoning_gym.factory import CURRICULA, DATASETS

    name, specs = options.dataset_name, options.dataset_specs
    if (name == "composite") != bool(specs):
        raise InvalidResetOptionError(
            f"expected dataset_specs with the data set 'composite' and with no other, got {name!r:.60}"
        )
    for one, config in [(name, options.dataset_config), *((spec.name, spec.config) for spec in specs)]:
        if one not in DATASETS:
            raise InvalidResetOptionError(f"expected a data set of reasoning-gym, got {one!r:.60}")
        if one in REFUSED:
            raise InvalidResetOptionError(
                f"expected a data set whose verifier only compares, got {one!r}, which evaluates answers as Python"
            )
        # Seed and size are options of the reset; a file would be one of the server's.
        if refused := sorted({"seed", "size", "data_file"} & config.keys()):
            raise InvalidResetOptionError(f"expected a configuration without {', '.join(refused)}")
    if specs:
        if options.dataset_config or options.difficulty is not None:
            raise InvalidResetOptionError("expected the configurations of a composite in dataset_specs only")
        parts = [composite.DatasetSpec(**spec.model_dump()) for spec in specs]
        return create_dataset(name, seed=seed, size=size, datasets=parts)
    config = options.dataset_config
    if options.difficulty is not None:
        if name not in CURRICULA:
            raise InvalidResetOptionError(f"expected no difficulty for {name!r}, which has no curriculum")
        curriculum = CURRICULA[name]()
        curriculum.set_global_level(options.difficulty)
        config = {**vars(curriculum.generate_configuration()), **config}
        del config["seed"], config["size"]
    return create_dataset(name, **config, seed=seed, size=size)
