"""What is sent to the trainer's process, and what it resumes from."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from rl_bridge.config import Config
from rl_bridge.errors import ConfigError
from rl_bridge.planning import ModelSize, bytes_by_checkpointing, choose_checkpointing, with_checkpointing
from rl_bridge.types import PolicyVersion


@dataclass(kw_only=True, slots=True, frozen=True)
class TrainerSettings:
    """The run's configuration, with what does not follow from it alone.

    Attributes:
        model_path: The checkpoint, which a task may have made.
        folder: The folder for checkpoints, visible to all ranks.
        max_loss_tokens: The most loss tokens of a trajectory.
    """

    config: Config
    model_path: str
    folder: str
    max_loss_tokens: int

    @property
    def tokens_per_pass(self) -> int:
        """The token budget of a pass, at least the longest row."""
        return max(self.config.trainer.tokens_per_pass, self.config.rollout.max_length)

    def resolve_checkpointing(self, gpu_bytes: int | None) -> tuple[Self, str]:
        """Resolve `trainer.activation_checkpointing` for a GPU of this size or a CPU (None); returns a message too.

        Raises ConfigError if the trainer needs more memory than the GPU has.
        """
        kind = self.config.trainer.activation_checkpointing
        if gpu_bytes is None:
            kind = "none" if kind == "auto" else kind
            return replace(self, config=with_checkpointing(self.config, kind)), kind
        needed = bytes_by_checkpointing(self.config, ModelSize.of_folder(Path(self.model_path)))
        if kind == "auto":
            kind = choose_checkpointing(needed, gpu_bytes)
        description = f"{kind}, which takes {needed[kind] / 1e9:.1f} of the {gpu_bytes / 1e9:.1f} GB of a GPU"
        if needed[kind] > gpu_bytes:
            raise ConfigError(
                f"expected a trainer that fits on its GPUs, got activation checkpointing {description}, by ropewalk "
                "plan; give it more ranks (trainer.num_gpus), or lower trainer.tokens_per_pass"
            )
        return replace(self, config=with_checkpointing(self.config, kind)), f"{description} by ropewalk plan"


@dataclass(kw_only=True, slots=True, frozen=True)
class ResumeState:
    """The controller's state in the checkpoint that the trainer resumes from; version 0 without one.

    `damaged` has a line for each newer checkpoint that could not be read.
    """

    version: PolicyVersion = 0
    run_state: Mapping[str, Any] = field(default_factory=dict)
    attachments: Mapping[str, bytes] = field(default_factory=dict)
    damaged: tuple[str, ...] = ()
