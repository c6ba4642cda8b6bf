"""The reference policy as a service: right, shared out, and asked again where a replica is lost."""

import asyncio
import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from rl_bridge.buffer.batch import TrainBatch
from rl_bridge.trainer.passes import reference_logprobs
from tests.rl_bridge.planning.published_models import QWEN3_8B
from tests.rl_bridge.trainer.trainer_ranks import batch, settings


class Fake:
    """Replicas that answer with the loss tokens themselves."""

    def __init__(self, replicas: int) -> None:
        self.serving = replicas
        self.logprobs = self
        self.asked: list[TrainBatch] = []

    async def route(self, part: TrainBatch) -> NDArray[np.float32]:
        self.asked.append(part)
        return part.target.astype(np.float32)


@pytest.mark.parametrize("replicas", [0, 1, 3, 100])
async def test_every_loss_token_is_asked_for_once_and_gets_its_own_answer(
    replicas: int, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    everything = batch(1, rows=60)
    fake: Any = Fake(replicas)
    replies = await reference_logprobs(fake, everything, settings(tmp_path, folder=tmp_path))
    assert replies.tolist() == everything.target.tolist()
    assert sum(map(len, fake.asked)) == len(everything)
    assert len(fake.asked) == min(max(1, replicas), len(everything.lengths))
    sizes = [int(part.lengths.sum()) for part in fake.asked]
    assert max(sizes) - min(sizes) <= 16  # two of the longest contexts


@pytest.mark.heavy
@pytest.mark.timeout(300)
async def test_two_replicas_of_a_real_model(tiny_policy: Path, tmp_path: Path) -> None:
    import torch
    from transformers import Qwen3ForCausalLM

    from rl_bridge.generator.vllm_api import ONE_THREAD
    from rl_bridge.services.fleet import Fleet
    from rl_bridge.trainer.actor import ReferenceActor

    everything = batch(3)
    options = settings(tiny_policy, folder=tmp_path, temperature=0.7)
    async with Fleet(tmp_path / "logs"):
        reference = await ReferenceActor.options(num_replicas=2, environment=ONE_THREAD).as_service(options)
        logprobs = await reference_logprobs(reference, everything, options)
        model = Qwen3ForCausalLM.from_pretrained(str(tiny_policy), dtype=torch.float32).eval()
        contexts = np.split(everything.tokens, np.cumsum(everything.lengths)[:-1])
        with torch.no_grad():
            for place in range(0, len(everything), 5):
                context = torch.from_numpy(contexts[everything.context[place]]).long().unsqueeze(0)
                logits = model(context).logits[0, everything.position[place]] / 0.7
                expected = torch.log_softmax(logits, -1)[everything.target[place]].item()
                assert logprobs[place] == pytest.approx(expected, abs=1e-4)
        asking = [
            asyncio.ensure_future(reference_logprobs(reference, everything, options)) for _ in range(20)
        ]
        await asyncio.sleep(0.01)
        os.kill(reference.replicas[0].pids[0], signal.SIGKILL)
        for again in await asyncio.gather(*asking):
            assert again == pytest.approx(logprobs, abs=1e-5)  # other shares are other shapes


@pytest.mark.heavy
def test_nothing_of_the_weights_stays_on_the_device_in_others_turns(
    tiny_policy: Path, tmp_path: Path
) -> None:
    from rl_bridge.trainer.reference import Reference

    everything, reference = batch(3), Reference(settings(tiny_policy, folder=tmp_path))
    weights: Any = reference._model.module.parameters()
    memory = [weight.to_local().untyped_storage() for weight in weights]
    expected = reference.logprobs(everything)
    for _ in range(2):
        reference.offload()
        left = sum(storage.nbytes() for storage in memory)
        assert left == 0
        assert reference.logprobs(everything).tolist() == expected.tolist()


@pytest.mark.heavy
@pytest.mark.timeout(300)
async def test_colocated_reference_answers_in_its_own_turn(
    tiny_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rl_bridge.generator.vllm_api import ONE_THREAD
    from rl_bridge.services.fleet import Fleet
    from rl_bridge.services.own_process import RUN_VARIABLE, GpuLock
    from rl_bridge.trainer.actor import ReferenceActor
    from rl_bridge.trainer.reference import Reference

    everything, alone = batch(3), settings(tiny_policy, folder=tmp_path)
    expected = Reference(alone).logprobs(everything)
    async with Fleet(tmp_path / "logs") as fleet:
        monkeypatch.setenv(RUN_VARIABLE, fleet._name)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        others = GpuLock()
        await others.acquire(0.0)
        bound = ReferenceActor.options(environment=ONE_THREAD)
        mesh = alone.config.monarch.model_copy(update={"colocate": True})
        colocated = replace(alone, config=alone.config.model_copy(update={"monarch": mesh}))
        reference = await bound.as_service(colocated)  # which waits for no turn
        for _ in range(2):
            asking = [asyncio.ensure_future(reference.logprobs.route(everything)) for _ in "ab"]
            assert not (await asyncio.wait(asking, timeout=1.0))[0]
            others.release()
            for logprobs in await asyncio.gather(*asking):
                assert logprobs == pytest.approx(expected, abs=1e-6)
            await others.acquire(0.0)
        others.release()
