"""What the trainer is started with: plain values that travel to its process."""

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
        folder: Where checkpoints go; all ranks see it.
        max_length: The longest row, in tokens.
        max_loss_tokens: The most tokens a trajectory can have in the loss.
        deterministic: Use only operations whose result does not depend on timing. The same batches then give the same
            loss, gradient norm and weights, to the last bit, on the same machine with the same ranks and threads.
        colocated: Others compute on the same GPU in turn.
        bytes_by_checkpointing: What a rank needs by each kind of activation checkpointing, among which it chooses
            where `trainer.activation_checkpointing` is `auto` (`rl_bridge.planning`).
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
        """The budget of a pass, in which the longest row has room."""
        return max(self.trainer.tokens_per_pass, self.max_length)

    def settle_checkpointing(self, gpu_bytes: int | None) -> tuple[Self, str]:
        """These with `trainer.activation_checkpointing` as on such a GPU, or on a CPU (None); and what to say of it."""
        kind, needed = self.trainer.activation_checkpointing, self.bytes_by_checkpointing
        if kind != "auto":
            return self, kind
        kind, description = "none", "none"
        if gpu_bytes is not None:
            kind = choose_checkpointing(needed, gpu_bytes)
            takes = f"{needed[kind] / 1e9:.1f} GB" if kind in needed else "an unknown part"
            description = (
                f"{kind}, which takes {takes} of the {gpu_bytes / 1e9:.1f} GB of a GPU by ropewalk plan"
            )
        trainer = self.trainer.model_copy(update={"activation_checkpointing": kind})
        return replace(self, trainer=trainer), description


@dataclass(kw_only=True, slots=True, frozen=True)
class ResumeState:
    """The controller's state in the checkpoint that the trainer resumes from; version 0 without one.

    `damaged` says what was wrong with newer ones, a line each.
    """

    version: PolicyVersion = 0
    run_state: Mapping[str, Any] = field(default_factory=dict)
    attachments: Mapping[str, bytes] = field(default_factory=dict)
    damaged: tuple[str, ...] = ()
