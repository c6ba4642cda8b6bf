"""Which presets are measured, and for how long."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any, Final, Self

from rl_bridge.config import PRESETS

CONFIG: Final = "examples/grpo_blackjack/config.yaml"
"""Supplies learning rate, entropy bonus and batch."""

OWN: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "dapo": ("trainer.iterations=130", "trainer.updates_per_iteration=2"),
        "gspo": ("trainer.iterations=200", "trainer.updates_per_iteration=2"),
    }
)
"""Overrides of the example where a preset wants others. DAPO plays twice as many groups as it trains, so it has time
for fewer iterations, and for less in each. GSPO's clip is so narrow that the first update on a batch takes most tokens
beyond it: what further ones cost is better spent on other batches."""
STARTING_S: Final = 60.0
"""About how long a run takes before and after its training."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How much is measured.

    Attributes:
        presets: Which.
        seeds: Of the runs.
        seconds: After which a run is told to go, whether it has come to its end or not. The iteration that it is in is
            its last, and has to end within ten minutes.
        own: Overrides of the example, by preset.
        words: Overrides of the example for all of them.
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
        """Return the parts by name, with about how long each takes, in seconds."""
        return {
            part_name(name, seed): self.seconds + STARTING_S for name in self.presets for seed in self.seeds
        }


def part_name(name: str, seed: int) -> str:
    """Return the name of the part that trains with a preset."""
    return f"{name}-{seed}"
