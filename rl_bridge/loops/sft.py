"""Supervised fine-tuning: a policy learns to write what traces have, until it gets no better at those kept apart.

The loss is -mean log pi over the tokens that the assistant wrote. The trainer is that of reinforcement learning: with
an advantage of 1 everywhere the objective `reinforce` is that loss.
"""

import math
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from rl_bridge.buffer.batch import TrainBatch
from rl_bridge.config import AlgorithmConfig, TrainerConfig
from rl_bridge.config.monarch import Dtype, resolve_dtype
from rl_bridge.config.sections import Checkpointing, Count, NonNegative, Positive, Section
from rl_bridge.devices import own_device
from rl_bridge.errors import ConfigError
from rl_bridge.planning import bytes_of_one_rank
from rl_bridge.trainer.settings import TrainerSettings
from rl_bridge.types import TrainSample


class SftConfig(Section):
    """How a policy is fine-tuned."""

    batch_size: Count = 16
    """Traces an update."""
    tokens_per_pass: Count = 16_384
    """Tokens a forward pass, at most; fewer take less memory and give the same gradient."""
    max_length: Count = 4096
    """The longest trace, in tokens."""
    learning_rate: Positive = 1e-5
    warmup_updates: Annotated[int, Field(ge=0)] = 0
    """Updates over which the learning rate rises linearly to its value, where it stays."""
    weight_decay: NonNegative = 0.0
    max_updates: Count = 1000
    max_seconds: Positive | None = None
    """After how long no update is begun any more; None for no limit."""
    evaluate_every: Count = 25
    """Updates between two validations, the first of which is before any update."""
    patience: Count | None = 4
    """How many validations in a row may be no better than the best before it ends. None goes on until a limit comes,
    whatever they say. Either way the weights of the best validation are kept."""
    dtype: Dtype = "auto"
    """What the passes compute in; auto is bfloat16 on a GPU, float32 on a CPU. Master weights are float32."""
    activation_checkpointing: Checkpointing = "auto"
    """As trainer.activation_checkpointing."""
    compile: bool = False
    """As trainer.compile."""
    num_threads: Count = 1
    """CPU threads."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Decides the order of traces."""


class Learner(Protocol):
    """What fine-tuning asks of `rl_bridge.trainer.trainer.Trainer`."""

    def step(self, batch: TrainBatch) -> dict[str, float]:
        """Make one update; returns its metrics, `loss/total` included."""

    def logprobs(self, batch: TrainBatch) -> NDArray[np.float32]:
        """The log-probability of each loss token under the weights as they are, shape [T]."""

    def export(self, folder: str | Path) -> None:
        """Write the weights as safetensors."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Validation:
    """What there was to see after some updates.

    Attributes:
        update: How many; 0 before the first.
        loss: Of the newest update, on its own batch, before it; None where there was none.
        validation_loss: -mean log pi over the tokens kept apart, after it.
        seconds: Since the beginning.
    """

    update: int
    loss: float | None
    validation_loss: float
    seconds: float


@dataclass(kw_only=True, slots=True, frozen=True)
class SftResult:
    """What came out.

    Attributes:
        kept: The one whose weights were written.
        settled: Whether the validation loss had stopped falling; False where a limit came first.
    """

    validations: Sequence[Validation]
    kept: Validation
    settled: bool


def trainer_settings(config: SftConfig, folder: Path, model_path: Path) -> TrainerSettings:
    """What the trainer is started with, which computes in this process."""
    gpus = 1 if own_device().type == "cuda" else 0
    dtype = resolve_dtype(config.dtype, gpus)
    trainer = TrainerConfig(
        iterations=config.max_updates,
        learning_rate=config.learning_rate,
        warmup_updates=config.warmup_updates,
        weight_decay=config.weight_decay,
        tokens_per_pass=config.tokens_per_pass,
        activation_checkpointing=config.activation_checkpointing,
        compile=config.compile,
        num_threads=config.num_threads,
    )
    return TrainerSettings(
        model_path=str(model_path),
        dtype=dtype,
        folder=str(folder.absolute()),
        max_length=config.max_length,
        max_loss_tokens=config.max_length,
        temperature=1.0,
        seed=config.seed,
        trainer=trainer,
        bytes_by_checkpointing=bytes_of_one_rank(trainer, model_path, dtype, config.max_length)
        if gpus
        else {},
        algorithm=AlgorithmConfig(objective="reinforce", aggregation="token_mean"),
    )


def fine_tune(
    learner: Learner,
    training: Sequence[Sequence[TrainSample]],
    validation: Sequence[Sequence[TrainSample]],
    config: SftConfig,
    *,
    folder: Path,
    on_validation: Callable[[Validation], None],
    last: Path | None = None,
) -> SftResult:
    """Train until the validation loss stops falling, or a limit comes first.

    The weights that it begins from are looked at too: where none are better, they are kept.

    Args:
        learner: A trainer with `trainer_settings`.
        training: The rows of each trace.
        validation: Likewise, of traces that are never trained on.
        config: How.
        folder: Where the weights go that are kept; see `begin_checkpoint`.
        on_validation: Told each validation.
        last: Where the weights of the last validation go too, be it the best or not.

    Raises:
        rl_bridge.errors.BridgeError: A trace is longer than `max_length`, the loss is not finite, or the weights cannot
            be written.
    """
    _require_room(training, "to train on", config)
    _require_room(validation, "to validate on", config)
    began = time.monotonic()
    kept_apart = _batch(validation)
    validations: list[Validation] = []

    def validate(update: int, loss: float | None, seconds: float) -> Validation:
        validation_loss = -float(np.mean(learner.logprobs(kept_apart), dtype=np.float64))
        result = Validation(update=update, loss=loss, validation_loss=validation_loss, seconds=seconds)
        validations.append(result)
        on_validation(result)
        return result

    best = validate(0, None, 0.0)
    learner.export(folder)
    for update, chosen in enumerate(_batches(len(training), config), 1):
        loss = learner.step(_batch([training[place] for place in chosen]))["loss/total"]
        seconds = time.monotonic() - began
        ended = update == config.max_updates or (
            config.max_seconds is not None and seconds >= config.max_seconds
        )
        if update % config.evaluate_every and not ended:
            continue
        newest = validate(update, loss, seconds)
        if newest.validation_loss < best.validation_loss:
            best = newest
            learner.export(folder)
        settled = (
            config.patience is not None and len(validations) - 1 - validations.index(best) >= config.patience
        )
        if settled or ended:
            if last is not None:
                learner.export(last)
            return SftResult(validations=validations, kept=best, settled=settled)
    raise AssertionError("the batches are endless")


def begin_checkpoint(folder: Path, model_path: Path) -> None:
    """Make a new folder in the Hugging Face layout of one that there is, without its weights, for `fine_tune`."""
    shutil.copytree(model_path, folder, ignore=shutil.ignore_patterns("*.safetensors*", "*.bin"))


def _require_room(traces: Sequence[Sequence[TrainSample]], label: str, config: SftConfig) -> None:
    for number, rows in enumerate(traces, 1):
        longest = max((len(row.tokens) for row in rows), default=0)
        if longest > config.max_length:
            raise ConfigError(
                f"expected traces {label} of at most {config.max_length} tokens (sft.max_length), got {longest} in "
                f"the {number}. of them; raise it as far as the model goes, or leave that trace out"
            )


def _batch(traces: Sequence[Sequence[TrainSample]]) -> TrainBatch:
    return TrainBatch.from_samples(
        [replace(row, trajectory=place) for place, rows in enumerate(traces) for row in rows]
    )


def _batches(traces: int, config: SftConfig) -> Iterator[NDArray[np.int64]]:
    """Places of traces, each once an epoch; an epoch's last batch may be smaller."""
    epoch = 0
    while True:
        order = np.random.default_rng([config.seed, epoch]).permutation(traces)
        yield from np.array_split(order, math.ceil(traces / config.batch_size))
        epoch += 1
