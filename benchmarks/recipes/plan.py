"""Settings of the benchmark: which recipes are measured, and at what size."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Self

RECIPES: Final = ("tools", "code")
"""A recipe NAME is `examples/sft/NAME.yaml`, followed by `examples/grpo_NAME`."""
SAMPLINGS: Final = ("uniform", "signal")
"""The values of `env.sampling` that are compared."""
SAMPLED_TASKS: Final = 200
"""Held-out tasks of that comparison."""
TEACHING_S: Final = 600.0
PLAYING_S: Final = 120.0
"""Estimates: seconds of fine-tuning, and of an evaluation on the held-out tasks, start-up included."""
GROUP_S: Final = 0.5
"""Estimate: seconds to play and train a group."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How much is measured.

    Attributes:
        recipes: Names of the recipes.
        seeds: Seeds of reinforcement learning, and of the order of traces in longer fine-tuning. All continue from the
            same taught policy.
        seconds: Duration of each continuation.
        sampling: Compare values of `env.sampling`, instead of the two continuations.
        groups: Groups to play with each sampling, on `train_tasks` tasks.
        train_tasks: Training tasks in a comparison of samplings; few enough that each recurs.
        tasks: Held-out tasks, played greedily.
        teaching: Overrides of the recipe's configuration.
        learning: Overrides of the world's configuration.
    """

    recipes: tuple[str, ...] = RECIPES
    seeds: tuple[int, ...] = (0, 1, 2)
    seconds: float = 900.0
    sampling: bool = False
    groups: int = 640
    train_tasks: int = 32
    tasks: int = 1000
    teaching: tuple[str, ...] = ()
    learning: tuple[str, ...] = ()

    def quick(self) -> "Plan":
        """Return the plan with tiny numbers, which only shows that it runs."""
        return Plan(
            recipes=self.recipes,
            seeds=(0,),
            seconds=5.0,
            sampling=self.sampling,
            groups=8,
            train_tasks=4,
            tasks=8,
            teaching=(
                "traces=8",
                "validation_traces=4",
                "policy.width=64",
                "policy.layers=1",
                "policy.vocabulary_tasks=0",
                "sft.batch_size=4",
                "sft.max_updates=4",
                "sft.evaluate_every=2",
            ),
            learning=("rollout.batch_size=16", "env.sessions=16", "trainer.warmup_updates=0"),
        )

    def as_json(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Return the plan of `as_json`."""
        values: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in document.items()
        }
        return cls(**values)

    def files(self) -> Iterator[str]:
        """Yield the configuration files that are measured."""
        for name in self.recipes:
            yield recipe_file(name)
            yield f"examples/grpo_{name}/config.yaml"

    def parts(self) -> dict[str, float]:
        """Return the estimated seconds of each part, by name."""
        return dict(self._parts())

    def _parts(self) -> Iterator[tuple[str, float]]:
        for name in self.recipes:
            yield teaching_part(name), TEACHING_S + PLAYING_S
            for seed in self.seeds:
                if self.sampling:
                    for sampling in SAMPLINGS:
                        yield sampling_part(name, seed, sampling), self.groups * GROUP_S + PLAYING_S
                else:
                    yield reinforcement_part(name, seed), self.seconds + PLAYING_S
                    yield imitation_part(name, seed), self.seconds + 2 * PLAYING_S


def recipe_file(name: str) -> str:
    """Return the configuration file of a recipe."""
    return f"examples/sft/{name}.yaml"


def teaching_part(name: str) -> str:
    """Return the name of the part that teaches a recipe's policy and evaluates it."""
    return f"{name}-taught"


def reinforcement_part(name: str, seed: int) -> str:
    """Return the name of the part that continues by reinforcement learning."""
    return f"{name}-{seed}-reinforced"


def sampling_part(name: str, seed: int, sampling: str) -> str:
    """Return the name of the part that continues by reinforcement learning on few tasks, with one kind of sampling."""
    return f"{name}-{seed}-{sampling}"


def imitation_part(name: str, seed: int) -> str:
    """Return the name of the part that continues with the same traces."""
    return f"{name}-{seed}-longer"
