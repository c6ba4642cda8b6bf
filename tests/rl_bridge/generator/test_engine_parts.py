"""Parts of engines: a loop on its own thread, timeouts, and weights for another process."""

import asyncio
import contextlib
import json
import time
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from generator_fixtures import WAIT_S, be_patient, engine_config, wait_until
from pydantic import ValidationError
from torch import Tensor

from rl_bridge.config import Config
from rl_bridge.errors import GeneratorError
from rl_bridge.generator.base import Engine
from rl_bridge.generator.engine import VllmEngine
from rl_bridge.generator.vllm_api import (
    MAX_KV_BLOCKS,
    _make_engine_options,
    completion_of,
    prompt_of,
    small_kv_cache_bytes,
)
from rl_bridge.generator.vllm_worker import WeightReceiver, WeightSender
from rl_bridge.titan.architecture import architecture_of
from rl_bridge.types import Completion, SamplingSettings


class Stuck(Engine):
    """Whatever is asked of it ignores its cancellation, and its clean-up fails."""

    statistics = None

    async def _start(self) -> None:
        pass

    async def _generate(self, *_: Any) -> list[Completion]:
        for _ in range(2):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.get_running_loop().create_future()
        return []

    async def _abort_prompts(self, *_: Any) -> None:
        raise NotImplementedError

    async def _clean_up(self) -> None:
        raise RuntimeError("the clean-up is stuck")

    def load(self, *_: Any) -> Any:
        raise NotImplementedError

    sleep = load


def test_work_that_ignores_its_cancellation_does_not_keep_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_bridge.generator.base.GRACE_PERIOD_S", 0.05)
    engine = Stuck("test", stop_timeout_s=WAIT_S)
    engine.start().result(WAIT_S)
    engine.generate([], SamplingSettings(temperature=1.0, max_new_tokens=1))
    engine.close()
    assert str(engine.ended.exception(0)) == "the clean-up is stuck"


def state(seed: int) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(seed)
    return {
        "odd": torch.randn(3, 5, generator=source),
        "half": torch.randn(7, generator=source).to(torch.bfloat16),
        "turned": torch.randn(4, 6, generator=source).T,
        "number": torch.tensor(2.5),
        "none": torch.empty(0, 3),
    }


def same(read: Mapping[str, Tensor], written: Mapping[str, Tensor]) -> bool:
    return list(read) == list(written) and all(
        torch.equal(read[name], tensor) and read[name].dtype == tensor.dtype
        for name, tensor in written.items()
    )


def test_handed_over_tensors_are_read_as_written_and_their_memory_is_reused() -> None:
    sender, receiver = WeightSender(), WeightReceiver()
    read = receiver.read(sender.write(state(1)))
    assert same(read, state(1))
    again = receiver.read(sender.write(state(2)))
    assert again["odd"].data_ptr() == read["odd"].data_ptr()
    assert same(again, state(2))
    larger = {**state(3), "more": torch.ones(100_000)}
    assert same(receiver.read(sender.write(larger)), larger)
    sender.close()


@pytest.mark.heavy
def test_settings_of_vllm_follow_from_whether_a_replica_has_a_gpu() -> None:
    from rl_bridge.generator.actor import PolicyActor

    def environment(**options: Any) -> Mapping[str, str]:
        return PolicyActor.options(environment={"OWN": "1"}, **options).options.environment

    on_cpu, on_gpu = environment(), environment(with_gpus=True)
    # Whoever starts generators says this once, and no settings for CPUs meet an engine on a GPU.
    assert on_cpu["TORCHDYNAMO_DISABLE"] == "1"
    assert not {"TORCHDYNAMO_DISABLE", "VLLM_CPU_OMP_THREADS_BIND"} & on_gpu.keys()
    assert on_cpu["OWN"] == on_gpu["OWN"] == on_gpu["OMP_NUM_THREADS"] == "1"


def engine_answer(logprob: float) -> Any:
    """What vLLM answers: two tokens by version 5 of the weights, and one by version 6."""
    return SimpleNamespace(
        finish_reason="stop",
        weight_versions=[
            SimpleNamespace(version="5", start=0, end=2),
            SimpleNamespace(version="6", start=2, end=3),
        ],
        token_ids=(8, 9, 8),
        logprobs=[{token: SimpleNamespace(logprob=logprob)} for token in (8, 9, 8)],
    )


@pytest.mark.parametrize(("cache_version", "expected"), [(None, [5, 5, 6]), (3, [3, 5, 6]), (7, [5, 5, 6])])
def test_answer_is_as_old_as_the_cache_it_was_computed_with(
    cache_version: int | None, expected: list[int]
) -> None:
    assert completion_of(engine_answer(-0.5), cache_version=cache_version).versions == expected
    # Nor does a prompt meet what older weights have computed of another one.
    salt = {} if cache_version is None else {"cache_salt": str(cache_version)}
    assert prompt_of([1], cache_version) == {"type": "token", "prompt_token_ids": [1], **salt}


@pytest.mark.parametrize("broken", [float("nan"), float("-inf")])
def test_non_finite_log_probability_is_an_engine_failure(broken: float) -> None:
    with pytest.raises(GeneratorError, match=r"finite log-probability, got .*its weights or its kernels"):
        completion_of(engine_answer(broken))


class Busy(VllmEngine):
    """One whose engine gives no sign of life while it loads weights, or makes a step that does not end."""

    async def _start(self) -> None:
        self.free = asyncio.Event()
        self._llm = SimpleNamespace(is_paused=self.free.wait, wake_up=self._wait, sleep=self._wait)

    async def _wait(self, *_: Any, **__: Any) -> None:
        await self.free.wait()

    async def _clean_up(self) -> None:
        pass


def test_engine_may_load_for_longer_than_it_may_make_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Busy(engine_config(), "nowhere", seed=0)
    be_patient(engine, monkeypatch, 10.0)
    engine.start().result(WAIT_S)
    engine.check()
    engine._probe_sent_at -= 15.0  # it has been silent for so long
    with pytest.raises(GeneratorError, match=r"a step within 10 s, it has been at one for 15 s"):
        engine.check()
    sleeping = engine.sleep()
    wait_until(lambda: engine._activity_counts["sleep"])
    engine.check()
    engine._probe_sent_at -= 10.0
    with pytest.raises(GeneratorError, match=r"a step within 20 s, it has been at one for 25 s"):
        engine.check()
    assert engine._loop is not None
    engine._loop.call_soon_threadsafe(engine.free.set)
    sleeping.result(WAIT_S)
    # What was asked while it was busy may be answered a moment later: that moment alone counts.
    engine._probe, engine._probe_sent_at = Future(), time.monotonic() - 15.0
    engine.check()
    engine._last_slow_end -= 15.0
    with pytest.raises(GeneratorError, match=r"a step within 10 s, it has been at one for 15 s"):
        engine.check()
    engine.close()


def test_token_timeout_is_suspended_while_weights_load(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Busy(engine_config(), "nowhere", seed=0)
    be_patient(engine, monkeypatch, 0.05)
    engine.start().result(WAIT_S)

    async def wait(seconds: float) -> None:
        async with engine._require_progress():
            await asyncio.sleep(seconds)

    async def wait_while_it_loads() -> None:
        with engine._count_activity("load weights"):
            await wait(0.5)

    engine._submit(wait_while_it_loads()).result(WAIT_S)
    with pytest.raises(TimeoutError):
        engine._submit(wait(WAIT_S)).result(WAIT_S)
    engine.close()


SHAPE = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 100,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
}


def tiny(**other: Any) -> Any:
    return architecture_of(SHAPE | other, where="here")


def test_small_model_gets_no_more_blocks_than_are_soon_made() -> None:
    def of(**rollout: int) -> Config:
        return Config.model_validate({"rollout": rollout, "model": {"dtype": "bfloat16"}})

    share, config = 119 << 30, of(max_length=32, max_num_seqs=256)
    # 16 tokens x 2 layers x (32 + 32) numbers of 2 bytes: of those there would be 31 million.
    assert small_kv_cache_bytes(config, tiny(), share) == MAX_KV_BLOCKS * 4096
    assert small_kv_cache_bytes(config, tiny(), MAX_KV_BLOCKS * 4096) is None  # not beside all the rest
    large = tiny(num_hidden_layers=28, num_key_value_heads=8, head_dim=128)
    assert small_kv_cache_bytes(config, large, share) is None  # what there is room for is less
    long = of(max_length=16 * MAX_KV_BLOCKS // 64, max_num_seqs=128)
    assert small_kv_cache_bytes(long, tiny(), share) == 4 * MAX_KV_BLOCKS * 4096  # twice those at once


@pytest.mark.heavy
def test_further_options_of_the_engine_take_the_place_of_ours(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    further = {"block_size": 64, "max_num_batched_tokens": 9000}
    config = Config.model_validate({"rollout": {}, "generator": {"options": further}})
    options = _make_engine_options(config, str(tmp_path), 0)
    assert {name: options[name] for name in further} == further
    assert options["max_model_len"] == config.rollout.max_length
    with pytest.raises(
        ValidationError, match=r"generator\.options without dtype, seed, which the run decides"
    ):
        Config.model_validate({"rollout": {}, "generator": {"options": {"seed": 1, "dtype": "half"}}})


@pytest.mark.heavy
@pytest.mark.parametrize(("transport", "versions"), [("auto", 0), ("cuda_ipc", 2)])
def test_versions_that_the_trainer_keeps_on_the_gpu_come_off_the_engine_s_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str, versions: int
) -> None:
    from vllm.platforms import current_platform

    monkeypatch.setattr("rl_bridge.devices.own_device", lambda: torch.device("cuda"))
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | {"vocab_size": 2_000_000}))
    mesh = {"colocate": True, "transport": transport}
    config = Config.model_validate({"monarch": mesh, "rollout": {}, "trainer": {"num_gpus": 1}})
    options = _make_engine_options(config, str(tmp_path), 0)
    kept = versions * 2 * tiny(vocab_size=2_000_000).parameters
    assert options["gpu_memory_utilization"] == pytest.approx(
        0.85 - kept / current_platform.get_device_total_memory(), abs=1e-6
    )
