"""Settings of the benchmark: which presets are measured, and for how long."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any, Final, Self

from rl_bridge.config import PRESETS

CONFIG: Final = "examples/grpo_blackjack/config.yaml"
"""The configuration that supplies learning rate, entropy bonus and batch."""

OWN: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "dapo": ("trainer.iterations=130", "trainer.updates_per_iteration=2"),
        "gspo": ("trainer.iterations=200", "trainer.updates_per_iteration=2"),
    }
)
"""Overrides of the example for presets that need others. DAPO plays twice as many groups as it trains, so there is time
for fewer iterations with fewer updates. GSPO's clip range is so narrow that the first update on a batch moves most
tokens beyond it; the time of further updates is better spent on new batches."""
STARTING_S: Final = 60.0
"""Estimate: seconds of a run before and after its training."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How much is measured.

    Attributes:
        presets: Names of the presets.
        seeds: Seeds of the runs.
        seconds: Seconds after which a run is preempted: it finishes its iteration and stops, which has to happen
            within ten minutes of its start.
        own: Overrides of the example, by preset.
        words: Overrides of the example for all presets.
    """

    presets: tuple[str, ...] = tuple(PRESETS)
    seeds: tuple[int, ...] = (0,)
    seconds: float = 590.0
    own: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: dict(OWN))
    words: tuple[str, ...] = ()

    def quick(self) -> "Plan":
        """Return the plan with tiny numbers, which only shows that it runs."""
        return Plan(
            presets=self.presets,
            own={},
            words=(
                "rollout.batch_size=32",
                "env.sessions=32",
                "trainer.iterations=2",
                "evaluation.interval=1",
            ),
        )

    def as_json(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Return the plan of `as_json`."""
        values = {key: tuple(value) if isinstance(value, list) else value for key, value in document.items()}
        return cls(
            **values | {"own": {name: tuple(overrides) for name, overrides in document["own"].items()}}
        )

    def parts(self) -> dict[str, float]:
        """Return the estimated seconds of each part, by name."""
        return {
            part_name(name, seed): self.seconds + STARTING_S for name in self.presets for seed in self.seeds
        }


def part_name(name: str, seed: int) -> str:
    """Return the name of the part that trains with a preset."""
    return f"{name}-{seed}"
