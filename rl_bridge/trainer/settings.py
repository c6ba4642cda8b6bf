"""What the trainer is started with: plain values that travel to its process."""

from dataclasses import dataclass

from rl_bridge.config import AlgorithmConfig, TrainerConfig


@dataclass(kw_only=True, slots=True, frozen=True)
class TrainerSettings:
    """The parts of the configuration that the trainer needs.

    Attributes:
        model_path: The checkpoint to begin with.
        dtype: What the forward pass computes in.
        folder: Where checkpoints go.
        max_length: The longest row, in tokens.
        max_loss_tokens: The most tokens a trajectory can have in the loss.
        temperature: Of the sampling.
        seed: Of everything random in the trainer.
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
