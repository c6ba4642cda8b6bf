"""The settings of the trainer: plain values that are sent to its process."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from rl_bridge.config import AlgorithmConfig, LoraConfig, TrainerConfig
from rl_bridge.config.sections import Checkpointing
from rl_bridge.planning import choose_checkpointing
from rl_bridge.types import PolicyVersion


@dataclass(kw_only=True, slots=True, frozen=True)
class TrainerSettings:
    """The parts of the configuration that the trainer needs.

    Attributes:
        folder: The folder for checkpoints, visible to all ranks.
        max_length: The length of the longest row, in tokens.
        max_loss_tokens: The most loss tokens of a trajectory.
        deterministic: Use only operations whose result does not depend on timing. The same batches then give the same
            loss, gradient norm and weights, to the last bit, on the same machine with the same ranks and threads.
        colocated: Whether other roles take turns on the same GPU.
        bytes_by_checkpointing: The bytes that a rank needs with each kind of activation checkpointing, for the choice
            when `trainer.activation_checkpointing` is `auto` (`rl_bridge.planning`).
    """

    model_path: str
    dtype: str
    folder: str
    max_length: int
    max_loss_tokens: int
    temperature: float
    seed: int
    trainer: TrainerConfig
    algorithm: AlgorithmConfig
    lora: LoraConfig | None = None
    deterministic: bool = False
    colocated: bool = False
    bytes_by_checkpointing: Mapping[Checkpointing, int] = field(default_factory=dict)

    @property
    def tokens_per_pass(self) -> int:
        """The token budget of a pass, at least the longest row."""
        return max(self.trainer.tokens_per_pass, self.max_length)

    def resolve_checkpointing(self, gpu_bytes: int | None) -> tuple[Self, str]:
        """Resolve `trainer.activation_checkpointing` for a GPU of this size or a CPU (None); returns a message too."""
        kind, needed = self.trainer.activation_checkpointing, self.bytes_by_checkpointing
        if kind != "auto":
            return self, kind
        kind, description = "none", "none"
        if gpu_bytes is not None:
            kind = choose_checkpointing(needed, gpu_bytes)
            size_note = f"{needed[kind] / 1e9:.1f} GB" if kind in needed else "an unknown part"
            description = (
                f"{kind}, which takes {size_note} of the {gpu_bytes / 1e9:.1f} GB of a GPU by ropewalk plan"
            )
        trainer = self.trainer.model_copy(update={"activation_checkpointing": kind})
        return replace(self, trainer=trainer), description


@dataclass(kw_only=True, slots=True, frozen=True)
class ResumeState:
    """The controller's state in the checkpoint that the trainer resumes from; version 0 without one.

    `damaged` has a line for each newer checkpoint that could not be read.
    """

    version: PolicyVersion = 0
    run_state: Mapping[str, Any] = field(default_factory=dict)
    attachments: Mapping[str, bytes] = field(default_factory=dict)
    damaged: tuple[str, ...] = ()
