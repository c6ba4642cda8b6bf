"""The reasoning environment as a run plays it, `examples.grpo_reasoning.world:app`, and one with noisy rewards.

Training seeds ask questions of the split train, held-out seeds those of the split test.
"""

import random
from typing import Any, Final

from envs.reasoning_env import ReasoningAction, ReasoningObservation, ReasoningState
from envs.reasoning_env.server.environment import ReasoningEnvironment
from openenv_core.rubrics import Rubric, WeightedSum
from openenv_core.tasks import draw_seed
from rl_bridge.rollout.assignment import TRAINING_SEEDS
from servers import create_app

ERROR_RATE: Final = 0.2
"""The share of answers that each noisy verifier judges wrongly."""


class ExactMatch(Rubric):
    """Gives 1 for a correct answer and 0 for any other, where the data set's score may give a part."""

    def forward(self, action: ReasoningAction, observation: ReasoningObservation) -> float:
        """Return the verdict."""
        return float(observation.score == 1.0)


class SplitEnvironment(ReasoningEnvironment):
    """Asks from the split that belongs to the seed, and rewards exact answers."""

    def __init__(self) -> None:
        super().__init__()
        self._exact = self.rubric = ExactMatch()

    def reset(
        self, *, seed: int | None = None, episode_id: str | None = None, **options: Any
    ) -> ReasoningObservation:
        """Ask a question; see `ReasoningEnvironment.reset`. The option `split` is not taken."""
        seed = draw_seed() % TRAINING_SEEDS if seed is None else seed
        split = "train" if seed < TRAINING_SEEDS else "test"
        return super().reset(seed=seed, episode_id=episode_id, split=split, **options)


class NoisyVerifier(Rubric):
    """Gives 1 for a correct answer and 0 for a wrong one, except for a share of the answers, which it mistakes.

    The verifier's seed, the question and the answer determine which: asked again, it errs again.
    """

    def __init__(self, seed: int, error_rate: float = ERROR_RATE) -> None:
        self.seed = seed
        self.error_rate = error_rate

    def forward(self, action: ReasoningAction, observation: ReasoningObservation) -> float:
        """Return the verdict."""
        case = f"{self.seed} {observation.dataset_metadata} {observation.correct_answer} {action.answer}"
        is_mistaken = random.Random(case).random() < self.error_rate
        return float((observation.score == 1.0) != is_mistaken)


class NoisyEnvironment(SplitEnvironment):
    """Rewards answers in training with the mean verdict of three noisy verifiers, held-out ones exactly."""

    def __init__(self) -> None:
        super().__init__()
        self._ensemble = WeightedSum([NoisyVerifier(seed) for seed in range(3)], [1 / 3] * 3)

    def reset(
        self, *, seed: int | None = None, episode_id: str | None = None, **options: Any
    ) -> ReasoningObservation:
        """Ask a question; see `SplitEnvironment.reset`."""
        question = super().reset(seed=seed, episode_id=episode_id, **options)
        self.rubric = self._ensemble if self.state.split == "train" else self._exact
        return question


app, noisy_app = (
    create_app(
        environment,
        ReasoningAction,
        ReasoningObservation,
        env_name="reasoning_by_seed",
        max_concurrent_envs=1024,
        state_cls=ReasoningState,
    )
    for environment in (SplitEnvironment, NoisyEnvironment)
)
