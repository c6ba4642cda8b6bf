"""A learned reward model: one number a response, the same in whatever batch it is scored."""

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rl_bridge.errors import ModelError, RewardError

pytestmark = [pytest.mark.heavy, pytest.mark.soak, pytest.mark.timeout(300)]

WORDS = ["hit", "stand", "17 0 10", "a rather long answer that goes on for a while", "stand stand"]


def make_reward_model(folder: Path, policy: Path, *, labels: int = 1, end_as_padding: bool = False) -> Path:
    """Qwen3 with a number at its end, of the tiny policy's size and with its tokenizer."""
    import torch
    from transformers import AutoConfig, AutoTokenizer, Qwen3ForSequenceClassification

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(policy)
    config = AutoConfig.from_pretrained(policy, num_labels=labels)
    config.pad_token_id = tokenizer.eos_token_id if end_as_padding else None
    Qwen3ForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def load(path: Path) -> Any:
    from rl_bridge.rewards.model import RewardModel

    return RewardModel(str(path), max_length=64)


@pytest.fixture(scope="module")
def checkpoint(tiny_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_reward_model(tmp_path_factory.mktemp("reward_model"), tiny_policy)


@pytest.mark.parametrize("end_as_padding", [False, True])
def test_a_response_has_the_same_reward_in_whatever_batch(
    tiny_policy: Path, tmp_path: Path, end_as_padding: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rl_bridge.rewards.model.MAX_BATCH", 3)
    model = load(make_reward_model(tmp_path, tiny_policy, end_as_padding=end_as_padding))
    pairs = [("17 0 10", word) for word in WORDS]
    alone = [model.score([pair])[0] for pair in pairs]
    assert len({round(value, 6) for value in alone}) == len(WORDS)
    assert model.score(pairs) == pytest.approx(alone, abs=1e-5)
    assert model.score(pairs[::-1]) == pytest.approx(alone[::-1], abs=1e-5)


def test_too_long_has_no_reward_and_no_number_is_an_error(
    checkpoint: Path, tiny_policy: Path, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match="with one label"):
        load(make_reward_model(tmp_path, tiny_policy, labels=2))
    model = load(checkpoint)
    assert model.score([("17 0 10", "hit " * 100)]) == [None]  # too long
    model._model.score.weight.fill_(float("nan"))
    with pytest.raises(RewardError, match="expected a finite reward"):
        model.score([("17 0 10", "hit")])


async def test_concurrent_callers_share_batches_and_errors_are_told_to_each() -> None:
    from rl_bridge.rewards.model import RewardBatches

    sizes: list[int] = []
    first = threading.Event()

    def score(pairs: Sequence[tuple[Any, str]]) -> list[float | None]:
        sizes.append(len(pairs))
        first.wait(60)
        if any(response == "wrong" for _, response in pairs):
            raise ZeroDivisionError("the model is wrong")
        return [float(response) for _, response in pairs]

    batches = RewardBatches(score, max_batch=4)
    calls = [asyncio.ensure_future(batches.evaluate("", str(number))) for number in range(9)]
    while not sizes:  # noqa: ASYNC110 - set by a thread
        await asyncio.sleep(0.001)
    calls[8].cancel()
    first.set()
    assert await asyncio.gather(*calls[:8]) == [float(number) for number in range(8)]
    assert sizes[0] <= 4
    assert max(sizes) == 4
    with pytest.raises(RewardError, match="ZeroDivisionError: the model is wrong"):
        await batches.evaluate("", "wrong")
    assert await batches.evaluate("", "7") == 7.0


async def test_it_is_a_service(checkpoint: Path, tmp_path: Path) -> None:
    from rl_bridge.rewards.actor import RewardModelActor
    from rl_bridge.services.fleet import Fleet

    async with Fleet(tmp_path / "logs"), asyncio.timeout(120):
        reward = await RewardModelActor.options(name="reward").as_service(str(checkpoint), 64)
        calls = [
            reward.evaluate_response.route(prompt="17 0 10", response=word, target=None) for word in WORDS
        ]
        expected = load(checkpoint).score([("17 0 10", word) for word in WORDS])
        assert await asyncio.gather(*calls) == pytest.approx(expected, abs=1e-5)
