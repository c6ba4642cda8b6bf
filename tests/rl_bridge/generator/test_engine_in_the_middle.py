"""A real engine that takes weights in the middle of answers; and seeds, which decide answers whatever happens."""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from generator_fixtures import engine_settings, prompts
from torch import Tensor

from rl_bridge.errors import GeneratorError
from rl_bridge.types import Completion, SamplingSettings

pytestmark = [pytest.mark.heavy, pytest.mark.soak, pytest.mark.timeout(300)]

WAIT_S = 60.0
"""A bound for what would hang otherwise; none is meant to come near it."""
TOKENS = 40
WARM = SamplingSettings(temperature=0.8, max_new_tokens=TOKENS)
# 64 prompts of these have 19,200 tokens: more than one step of the engine takes.
MANY = prompts(64, length=300)
SEEDS = [10_000_000_000 + place for place in range(len(MANY))]


@pytest.fixture(scope="module")
def engine(long_policy: Path, engine_environment: None) -> Iterator[Any]:
    from rl_bridge.generator.engine import VllmEngine

    one = VllmEngine(
        engine_settings(long_policy, max_length=512, weight_update="continue", kv_cache_bytes=64 << 20)
    )
    one.start().result(200)
    yield one
    one.close()


def until_generating(engine: Any) -> None:
    """Wait until the engine is in the middle of what it was asked for."""
    wait_until(lambda: bool(engine._batches))
    time.sleep(0.02)  # some steps


def wait_until(so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not so():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_seed_decides_an_answer_whatever_the_batch(engine: Any) -> None:
    together = engine.generate(MANY, WARM, SEEDS).result(WAIT_S)
    alone = [engine.generate([MANY[place]], WARM, [SEEDS[place]]) for place in (0, 17, 63)]
    assert [future.result(WAIT_S)[0] for future in alone] == [together[place] for place in (0, 17, 63)]
    # Backwards, three at a time, beside others that are drawn.
    others = [engine.generate(MANY[:5], WARM) for _ in range(3)]
    parts = [
        engine.generate(MANY[end - 3 : end][::-1], WARM, SEEDS[end - 3 : end][::-1])
        for end in range(len(MANY), 1, -3)
    ]
    backwards = list(itertools.chain.from_iterable(part.result(WAIT_S) for part in parts))
    assert backwards == together[:0:-1]
    for other in others:
        other.result(WAIT_S)


def test_seeds_differ_and_without_one_answers_are_drawn(engine: Any) -> None:
    same = [MANY[0]] * 3
    one, again, other = engine.generate(same, WARM, [7, 7, 8]).result(WAIT_S)
    assert one == again
    assert list(one.tokens) != list(other.tokens)
    drawn = engine.generate(same, WARM).result(WAIT_S)
    assert len({tuple(answer.tokens) for answer in drawn}) == 3


@pytest.mark.parametrize("seeds", [[1], [1, 2, 3], [1, -1], [1, 2**63], [1, 2.5]])
def test_seeds_that_do_not_fit_are_refused(engine: Any, seeds: Sequence[int]) -> None:
    with pytest.raises(GeneratorError, match="expected 2 seeds from 0"):
        engine.generate(MANY[:2], WARM, seeds).result(WAIT_S)


def test_an_answer_goes_on_under_new_weights(
    engine: Any, reference: Any, weights: Callable[[int], dict[str, Tensor]]
) -> None:
    from transformers import Qwen3ForCausalLM

    plain = engine.generate(MANY, WARM, SEEDS).result(WAIT_S)
    answering = engine.generate(MANY, WARM, SEEDS)
    until_generating(engine)
    figures = engine.load(3, weights(3)).result(WAIT_S)
    assert not answering.done()  # nothing was waited for
    assert 0 < figures.load_s <= figures.pause_s
    answers = answering.result(WAIT_S)
    models = {0: reference, 3: Qwen3ForCausalLM(reference.config).eval()}
    models[3].load_state_dict({**weights(3), "lm_head.weight": weights(3)["model.embed_tokens.weight"]})
    mixed = 0
    for prompt, answer, before in zip(MANY, answers, plain, strict=True):
        assert list(answer.versions) == sorted(answer.versions)
        assert set(answer.versions) <= {0, 3}
        mixed += set(answer.versions) == {0, 3}
        old = list(answer.versions).count(0)
        assert list(answer.tokens[:old]) == list(before.tokens[:old])
        # Each token comes from exactly the distribution of the weights that it names.
        for version in set(answer.versions):
            told = [lp for lp, v in zip(answer.logprobs, answer.versions, strict=True) if v == version]
            expected = [
                lp
                for lp, v in zip(logprobs(models[version], prompt, answer), answer.versions, strict=True)
                if v == version
            ]
            assert told == pytest.approx(expected, abs=1e-4)
    assert mixed > len(MANY) / 2
    assert answers != plain


def logprobs(model: Any, prompt: Sequence[int], answer: Completion) -> list[float]:
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *answer.tokens]])).logits[0] / WARM.temperature
    distribution = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    return distribution.gather(1, torch.tensor(answer.tokens).unsqueeze(1)).squeeze(1).tolist()


def test_what_is_interrupted_by_the_same_weights_ends_as_if_it_were_not(
    engine: Any, weights: Callable[[int], dict[str, Tensor]]
) -> None:
    plain = engine.generate(MANY, WARM, SEEDS).result(WAIT_S)
    answering = engine.generate(MANY, WARM, SEEDS)
    until_generating(engine)
    for _ in range(3):
        engine.load(0, weights(0)).result(WAIT_S)
    assert not answering.done()
    assert answering.result(WAIT_S) == plain


def test_no_cached_prefix_outlives_its_weights(
    engine: Any, weights: Callable[[int], dict[str, Tensor]]
) -> None:
    greedy = SamplingSettings(temperature=0.0, max_new_tokens=4)
    engine.load(4, weights(4)).result(WAIT_S)
    expected = engine.generate(MANY[:8], greedy).result(WAIT_S)
    engine.load(0, weights(0)).result(WAIT_S)
    held = engine.generate(MANY[:8], WARM)  # these prompts' prefixes are in the cache, and in use
    until_generating(engine)
    engine.load(4, weights(4)).result(WAIT_S)
    assert not held.done()
    assert engine.generate(MANY[:8], greedy).result(WAIT_S) == expected
    held.result(WAIT_S)


def test_a_cancelled_batch_is_worked_on_no_longer(engine: Any) -> None:
    long = SamplingSettings(temperature=1.0, max_new_tokens=200)
    answering = engine.generate(MANY, long)
    until_generating(engine)
    assert answering.cancel()
    short = engine.generate(MANY[:1], SamplingSettings(temperature=1.0, max_new_tokens=1))
    assert len(short.result(WAIT_S)) == 1
    wait_until(lambda: not engine._batches)
    assert engine._engine.get_num_unfinished_requests() == 0


def test_what_takes_too_long_is_given_up(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    monkeypatch.setattr(engine, "_settings", replace(engine._settings, timeout_s=0.1))
    late = engine.generate(MANY, SamplingSettings(temperature=1.0, max_new_tokens=200))
    monkeypatch.undo()
    beside = engine.generate(MANY[:2], WARM, SEEDS[:2])
    with pytest.raises(GeneratorError, match=r"expected answers to 64 prompts within 0.1 s, got \d+"):
        late.result(WAIT_S)
    assert beside.result(WAIT_S) == engine.generate(MANY[:2], WARM, SEEDS[:2]).result(WAIT_S)
    wait_until(lambda: not engine._batches)
    assert engine._engine.get_num_unfinished_requests() == 0


def test_an_engine_at_one_step_for_too_long_is_not_healthy(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    engine.check()
    step = engine._batches.step
    hang_s = 1.0

    def hang() -> None:
        time.sleep(hang_s)
        monkeypatch.undo()
        step()

    monkeypatch.setattr(engine._batches, "step", hang)
    answering = engine.generate(MANY[:1], WARM)
    until_generating(engine)
    engine.check()
    monkeypatch.setattr(engine, "_settings", replace(engine._settings, timeout_s=0.01))
    with pytest.raises(GeneratorError, match=r"expected the engine to make a step within 0.01 s"):
        engine.check()
    assert len(answering.result(WAIT_S)) == 1
    time.sleep(0.1)
    engine.check()  # idle, however long
