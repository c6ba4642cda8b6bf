"""Synchronises weights with a real engine; each time also measures the engine's reload from its own memory."""

import asyncio
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from monarch.actor import concurrent_endpoint

from benchmarks.wire.measurements import Measurements
from rl_bridge.config import Config, RolloutConfig
from rl_bridge.generator.actor import PolicyActor
from rl_bridge.generator.replica import Checkpoint
from rl_bridge.services.fleet import Fleet
from rl_bridge.types import SamplingSettings
from rl_bridge.weights import WeightStore

WHOLE: Final = "the whole sync / (transport + the engine's own reload)"
IDLE, BUSY = "an idle engine", "an engine at work"
WARM_UP = 3
DIM, HIDDEN, VOCABULARY, HEADS, MAX_LENGTH = 640, 1728, 32_768, 10, 256
LAYER_PARAMETERS = 3 * DIM * DIM + 3 * DIM * HIDDEN
CONFIG = Config(
    rollout=RolloutConfig(max_length=MAX_LENGTH, max_num_seqs=16, kv_cache_mb=128, weight_update="continue")
)
WORK = SamplingSettings(temperature=1.0, max_new_tokens=32)


class MeasuredPolicy(PolicyActor):
    """A policy that also measures its engine's reload."""

    def __init__(self, config: Config, model_path: Path, store: WeightStore) -> None:
        super().__init__(config, model_path, store)
        self._store = store

    @concurrent_endpoint  # type: ignore[untyped-decorator]
    async def reload(self, version: int) -> float:
        """Load a version from memory of this process; returns the seconds it took."""
        state = await self._store.get(version)
        result = await asyncio.wrap_future(self._replica._engine.load(version, state))
        return float(result.load_s)


def make_checkpoint(folder: Path, parameters: int) -> None:
    """Write a checkpoint of Qwen3's architecture with about `parameters` parameters."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=DIM,
        intermediate_size=HIDDEN,
        num_hidden_layers=max(1, round((parameters - 2 * DIM * VOCABULARY) / LAYER_PARAMETERS)),
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,
        head_dim=DIM // HEADS,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    Qwen3ForCausalLM(config).to(torch.float32).save_pretrained(str(folder))


async def synchronisations(
    parameters: int, rounds: int, measurements: Measurements, progress: Callable[[str], None]
) -> None:
    """Synchronise `rounds` times with an idle engine and `rounds` times with a busy one, and add the measurements.

    This process acts as the trainer: it publishes the checkpoint's weights as every version.
    """
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = Path(scratch) / "checkpoint"
        progress("writing the model")
        make_checkpoint(checkpoint, parameters)
        weights = Checkpoint(checkpoint).tensors()
        measurements.add(
            "million parameters", "the model", "", sum(t.numel() for t in weights.values()) / 1e6
        )
        store = WeightStore.create()
        async with Fleet(Path(scratch) / "logs"):
            progress("starting the engine")
            policy = await MeasuredPolicy.as_service(CONFIG, checkpoint, store)
            version = 0
            for state in (IDLE, BUSY):
                for number in range(WARM_UP + rounds):
                    progress(f"{state}: {number + 1} of {WARM_UP + rounds}")
                    version += 1
                    timings = await _synchronise(policy, store, weights, version, busy=state == BUSY)
                    for metric, value in timings.items():
                        if number >= WARM_UP:
                            measurements.add(metric, state, "", value)
        await store.close()


async def _synchronise(
    policy: Any, store: WeightStore, weights: dict[str, torch.Tensor], version: int, *, busy: bool
) -> dict[str, float]:
    prompts = [[token, token + 1, token + 2] for token in range(16)]
    working = asyncio.ensure_future(policy.generate_many.route(prompts, WORK)) if busy else None
    if working is not None:
        await asyncio.sleep(0.2)
    start_time = time.monotonic()
    await store.put(version, weights)
    put_s = time.monotonic() - start_time
    update = (await policy.update_weights.fanout(version)).values[0]
    whole = time.monotonic() - start_time
    if working is not None:
        await working
    reload = await policy.reload.route(version)
    transport = put_s + update.transport_s
    return {
        "whole ms": 1000 * whole,
        "put ms": 1000 * put_s,
        "to tensors ms": 1000 * update.transport_s,
        "replacing the weights ms": 1000 * update.load_s,
        "own reload ms": 1000 * reload,
        "pause ms": 1000 * update.pause_s,
        WHOLE: whole / (transport + reload),
    }
