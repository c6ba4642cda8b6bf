"""Supervised fine-tuning on traces, until the loss on a validation set stops falling.

The loss is -mean log pi over the assistant's tokens. The trainer is that of reinforcement learning: with an advantage
of 1 everywhere, the objective `reinforce` is that loss.
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
from rl_bridge.config import Config, TrainerConfig
from rl_bridge.config.monarch import Dtype
from rl_bridge.config.sections import Count, NonNegative, Positive, Section
from rl_bridge.config.trainer import Checkpointing
from rl_bridge.devices import own_device
from rl_bridge.errors import ConfigError
from rl_bridge.trainer.settings import TrainerSettings
from rl_bridge.types import TrainSample


class SftConfig(Section):
    """Settings of fine-tuning."""

    batch_size: Count = 16
    """Traces per update."""
    tokens_per_pass: Count = 16_384
    """Most tokens of a forward pass; fewer take less memory and give the same gradient."""
    max_length: Count = 4096
    """The longest trace, in tokens."""
    learning_rate: Positive = 1e-5
    warmup_updates: Annotated[int, Field(ge=0)] = 0
    """Updates over which the learning rate rises linearly to its value, where it stays."""
    weight_decay: NonNegative = 0.0
    max_updates: Count = 1000
    max_seconds: Positive | None = None
    """Seconds after which no further update is started; None for no limit."""
    evaluate_every: Count = 25
    """Updates between validations; the first is before any update."""
    patience: Count | None = 4
    """Validations in a row without an improvement after which training stops; None stops only at a limit. Either way
    the weights of the best validation are kept."""
    dtype: Dtype = "auto"
    """Compute dtype of the passes; auto is bfloat16 on a GPU, float32 on a CPU. Master weights are float32."""
    activation_checkpointing: Checkpointing = "auto"
    """As trainer.activation_checkpointing."""
    compile: bool = False
    """As trainer.compile."""
    num_threads: Count = 1
    """CPU threads."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of the order of traces."""


class Learner(Protocol):
    """The methods of `rl_bridge.trainer.trainer.Trainer` that fine-tuning uses."""

    def step(self, batch: TrainBatch) -> dict[str, float]:
        """Make one update; return its metrics, including `loss/total`."""

    def logprobs(self, batch: TrainBatch) -> NDArray[np.float32]:
        """Return the log-probability of each loss token under the current weights, shape [T]."""

    def export(self, folder: str | Path) -> None:
        """Write the weights as safetensors."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Validation:
    """A validation of the policy.

    Attributes:
        update: Updates so far; 0 before the first.
        loss: Training loss of the last update, on its batch, before it was applied; None before the first.
        validation_loss: -mean log pi over the tokens of the validation set.
        seconds: Seconds since the start.
    """

    update: int
    loss: float | None
    validation_loss: float
    seconds: float


@dataclass(kw_only=True, slots=True, frozen=True)
class SftResult:
    """Result of fine-tuning.

    Attributes:
        validations: All validations, in order.
        kept: The best one, whose weights were written.
        settled: Whether the validation loss stopped falling; False if a limit came first.
    """

    validations: Sequence[Validation]
    kept: Validation
    settled: bool


def trainer_settings(config: SftConfig, folder: Path, model_path: Path) -> TrainerSettings:
    """Return the settings of a trainer in this process."""
    keys = {
        "seed": config.seed,
        "model": {"dtype": config.dtype},
        "rollout": {"max_length": max(2, config.max_length), "max_new_tokens": 1},
        "algorithm": {"objective": "reinforce", "aggregation": "token_mean"},
        "trainer": {
            "iterations": config.max_updates,
            **config.model_dump(include=set(TrainerConfig.model_fields)),  # the keys that both have
        },
        "monarch": {"roles": {"trainer": {"gpus": int(own_device().type == "cuda")}}},
    }
    return TrainerSettings(
        config=Config.model_validate(keys),
        model_path=str(model_path),
        folder=str(folder.absolute()),
        max_loss_tokens=config.max_length,
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
    """Train until the validation loss stops falling, or a limit is reached.

    The initial weights are validated too, and kept if none are better.

    Args:
        learner: A trainer with `trainer_settings`.
        training: The rows of each trace to train on.
        validation: The rows of each trace to validate on.
        config: Settings of fine-tuning.
        folder: Folder for the weights of the best validation; see `begin_checkpoint`.
        on_validation: Called with each validation.
        last: Folder for the weights of the last validation, best or not, if wanted.

    Raises:
        rl_bridge.errors.BridgeError: A trace is longer than `max_length`, the loss is not finite, or the weights cannot
            be written.
    """
    _require_max_length(training, "to train on", config)
    _require_max_length(validation, "to validate on", config)
    began = time.monotonic()
    validation_batch = _make_batch(validation)
    validations: list[Validation] = []

    def validate(update: int, loss: float | None, seconds: float) -> Validation:
        validation_loss = -float(np.mean(learner.logprobs(validation_batch), dtype=np.float64))
        result = Validation(update=update, loss=loss, validation_loss=validation_loss, seconds=seconds)
        validations.append(result)
        on_validation(result)
        return result

    best = validate(0, None, 0.0)
    learner.export(folder)
    for update, indices in enumerate(_iterate_batches(len(training), config), 1):
        loss = learner.step(_make_batch([training[index] for index in indices]))["loss/total"]
        seconds = time.monotonic() - began
        at_limit = update == config.max_updates or (
            config.max_seconds is not None and seconds >= config.max_seconds
        )
        if update % config.evaluate_every and not at_limit:
            continue
        newest = validate(update, loss, seconds)
        if newest.validation_loss < best.validation_loss:
            best = newest
            learner.export(folder)
        settled = (
            config.patience is not None and len(validations) - 1 - validations.index(best) >= config.patience
        )
        if settled or at_limit:
            if last is not None:
                learner.export(last)
            return SftResult(validations=validations, kept=best, settled=settled)
    raise AssertionError("the batches are endless")


def begin_checkpoint(folder: Path, model_path: Path) -> None:
    """Copy a folder in the Hugging Face layout without its weights, which `fine_tune` writes there."""
    shutil.copytree(model_path, folder, ignore=shutil.ignore_patterns("*.safetensors*", "*.bin"))


def _require_max_length(traces: Sequence[Sequence[TrainSample]], label: str, config: SftConfig) -> None:
    for number, rows in enumerate(traces, 1):
        longest = max((len(row.tokens) for row in rows), default=0)
        if longest > config.max_length:
            raise ConfigError(
                f"expected traces {label} of at most {config.max_length} tokens (sft.max_length), got {longest} in "
                f"the {number}. of them; raise it as far as the model goes, or leave that trace out"
            )


def _make_batch(traces: Sequence[Sequence[TrainSample]]) -> TrainBatch:
    return TrainBatch.from_samples(
        [replace(row, trajectory=index) for index, rows in enumerate(traces) for row in rows]
    )


def _iterate_batches(traces: int, config: SftConfig) -> Iterator[NDArray[np.int64]]:
    """Yield batches of trace indices, each trace once per epoch; batches may differ in size by one."""
    epoch = 0
    while True:
        order = np.random.default_rng([config.seed, epoch]).permutation(traces)
        yield from np.array_split(order, math.ceil(traces / config.batch_size))
        epoch += 1
