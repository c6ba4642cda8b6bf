"""Real engines of both kinds: tokens and their log-probabilities, seeds, new weights amid answers, refusals."""

import asyncio
import itertools
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from generator_fixtures import (
    WAIT_S,
    be_patient,
    engine_config,
    logprobs,
    perturbed_weights,
    process_of,
    prompts,
    runs,
    wait_until,
)
from torch import Tensor

from rl_bridge.errors import GeneratorError, PromptRefusedError
from rl_bridge.types import SamplingSettings

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(300)]

WARM = SamplingSettings(temperature=0.8, max_new_tokens=60)
GREEDY = SamplingSettings(temperature=0.0, max_new_tokens=6)
# 64 prompts of these have 19,200 tokens: more than one step of the engine takes.
MANY = prompts(64, length=300)
SEEDS = [10_000_000_000 + place for place in range(len(MANY))]


@pytest.fixture(scope="module", params=["vllm", pytest.param("vllm_async", marks=pytest.mark.soak)])
def engine(request: pytest.FixtureRequest, long_policy: Path, engine_environment: None) -> Iterator[Any]:
    from rl_bridge.generator.replica import make_engine

    one = make_engine(
        engine_config(
            generator={"engine": request.param}, max_length=512, weight_update="continue", kv_cache_mb=64
        ),
        str(long_policy),
    )
    one.start().result(200)
    inner: Any = one
    pid = process_of(inner) if request.param == "vllm_async" else None
    yield one
    one.close()
    assert one.ended.result(WAIT_S) is None
    if pid is not None:
        wait_until(lambda: not runs(pid))
        assert inner._llm.engine_core.resources.ctx.closed


Weights = Callable[[int], dict[str, Tensor]]


@pytest.fixture
def weights(engine: Any, long_policy: Path) -> Iterator[Weights]:
    """Versions: other weights for each number; 0 is the checkpoint, to which the module's engine returns."""
    from rl_bridge.generator.replica import Checkpoint

    yield (
        lambda version: (
            perturbed_weights(long_policy, seed=version) if version else Checkpoint(long_policy).tensors()
        )
    )
    engine.load(0, Checkpoint(long_policy).tensors()).result(WAIT_S)


def until_idle(engine: Any) -> None:
    inner = getattr(engine._llm, "_engine", engine._llm)
    wait_until(lambda: inner.get_num_unfinished_requests() == 0)


def updates(engine: Any, patch: pytest.MonkeyPatch, how: str) -> None:
    """Have the engine take new weights in another way than its own, `continue`."""
    patch.setattr(engine, "_rollout", engine._rollout.model_copy(update={"weight_update": how}))


def by_seeds(engine: Any) -> Any:
    """The future of seeded answers that the engine is in the middle of."""
    answering = engine.generate(MANY, WARM, SEEDS)
    until_generating(engine)
    return answering


def until_generating(engine: Any) -> None:
    """Wait until the engine is in the middle of what it was asked for."""
    tokens = engine.statistics.totals.generated_tokens
    wait_until(lambda: engine.statistics.totals.generated_tokens > tokens + len(MANY))


def test_logprobs_are_those_of_the_sampling_distribution(engine: Any, reference: Any) -> None:
    batch = prompts(70)  # more than the engine works on at once
    for temperature in (1.0, 0.7):
        sampling = replace(WARM, temperature=temperature, max_new_tokens=8)
        answers = engine.generate(batch, sampling).result(WAIT_S)
        for prompt, answer in zip(batch, answers, strict=True):
            assert (len(answer.tokens), set(answer.versions), answer.stopped) == (8, {0}, False)
            assert answer.logprobs == pytest.approx(
                logprobs(reference, prompt, answer, temperature), abs=1e-4
            )
    assert engine.generate([], WARM).result(WAIT_S) == []


def test_logprobs_after_a_cached_prefix_are_those_of_the_whole_prompt(engine: Any, reference: Any) -> None:
    """Blocks of 32 tokens on a CPU: prompts that are one block, a token more, and some that branch in the middle."""
    (long,) = prompts(1, length=200)
    batch = [long[:length] for length in (32, 33, 64, 65, 90, 200)]
    batch += [
        [*long[:length], *prompts(3, length=20)[place % 3]] for place, length in enumerate((33, 64, 95, 190))
    ]
    sampling = replace(WARM, temperature=1.0, max_new_tokens=40)
    engine.generate([long], sampling).result(WAIT_S)  # now in the cache
    before = replace(engine.statistics.totals)
    answers = engine.generate(batch, sampling).result(WAIT_S)
    now = engine.statistics.totals
    assert now.cached_tokens - before.cached_tokens >= 0.7 * (now.prompt_tokens - before.prompt_tokens)
    for prompt, answer in zip(batch, answers, strict=True):
        assert answer.logprobs == pytest.approx(logprobs(reference, prompt, answer, 1.0), abs=1e-4)


def test_sampling_follows_the_distribution(engine: Any, reference: Any) -> None:
    (prompt,) = prompts(1)
    one = SamplingSettings(temperature=1.0, max_new_tokens=1)
    answers = engine.generate([prompt] * 3000, one).result(WAIT_S)
    counts = torch.bincount(
        torch.tensor([answer.tokens[0] for answer in answers]), minlength=reference.config.vocab_size
    )
    with torch.no_grad():
        expected = torch.softmax(reference(torch.tensor([prompt])).logits[0, -1], -1) * 3000
    # Pearson's statistic: of V - 1 degrees of freedom, so V + 6 sqrt(2 V) is six deviations away.
    statistic = ((counts - expected).square() / expected).sum().item()
    size = len(expected)
    assert statistic < size + 6 * (2 * size) ** 0.5


def test_greedy_answers_take_the_most_likely_and_include_their_stop_token(
    engine: Any, reference: Any
) -> None:
    batch = prompts(20)
    answers = engine.generate(batch, GREEDY).result(WAIT_S)
    for prompt, answer in zip(batch, answers, strict=True):
        with torch.no_grad():
            assert answer.tokens[0] == reference(torch.tensor([prompt])).logits[0, -1].argmax().item()
    stop = answers[0].tokens[2]
    (stopped,) = engine.generate(batch[:1], replace(GREEDY, stop_token_ids=(stop,))).result(WAIT_S)
    length = list(answers[0].tokens).index(stop) + 1
    assert (list(stopped.tokens), stopped.stopped) == (list(answers[0].tokens[:length]), True)


def test_seed_decides_an_answer_whatever_the_batch(engine: Any) -> None:
    together = engine.generate(MANY, WARM, SEEDS).result(WAIT_S)
    # Backwards, three at a time, beside others that are drawn.
    drawing = engine.generate([MANY[0]] * 3, WARM)
    parts = [
        engine.generate(MANY[end - 3 : end][::-1], WARM, SEEDS[end - 3 : end][::-1])
        for end in range(len(MANY), 1, -3)
    ]
    assert list(itertools.chain.from_iterable(part.result(WAIT_S) for part in parts)) == together[:0:-1]
    assert len({tuple(answer.tokens) for answer in drawing.result(WAIT_S)}) == 3
    one, again, other = engine.generate([MANY[0]] * 3, WARM, [7, 7, 8]).result(WAIT_S)
    assert one == again
    assert list(one.tokens) != list(other.tokens)


def test_answer_goes_on_under_new_weights(engine: Any, reference: Any, weights: Weights) -> None:
    from transformers import Qwen3ForCausalLM

    plain = engine.generate(MANY, WARM, SEEDS).result(WAIT_S)
    answering = by_seeds(engine)
    metrics = engine.load(3, weights(3)).result(WAIT_S)
    assert not answering.done()  # nothing was waited for
    assert 0 < metrics.load_s <= metrics.pause_s
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
            reported, expected = (
                [value for value, v in zip(values, answer.versions, strict=True) if v == version]
                for values in (answer.logprobs, logprobs(models[version], prompt, answer, WARM.temperature))
            )
            assert reported == pytest.approx(expected, abs=1e-4)
    assert mixed > len(MANY) / 2


def test_answer_goes_on_with_the_keys_and_values_that_it_has(
    engine: Any, reference: Any, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is computed anew; a token is of its own weights all the same, and other prompts are not misled."""
    updates(engine, monkeypatch, "keep_cache")
    before = replace(engine.statistics.totals)
    answering = by_seeds(engine)
    engine.load(6, weights(6)).result(WAIT_S)
    assert not answering.done()
    later = engine.generate(MANY[:8], GREEDY)  # whose prompts are in the cache, by the old weights
    answers, fresh = answering.result(WAIT_S), later.result(WAIT_S)
    now = engine.statistics.totals
    assert now.prompt_tokens - before.prompt_tokens == sum(map(len, [*MANY, *MANY[:8]]))
    assert now.preemptions == before.preemptions
    assert {version for answer in fresh for version in answer.versions} == {6}
    monkeypatch.undo()
    engine.load(6, weights(6)).result(WAIT_S)  # which drops the cache
    assert engine.generate(MANY[:8], GREEDY).result(WAIT_S) == fresh
    mixed = [answer for answer in answers if set(answer.versions) == {0, 6}]
    assert len(mixed) > len(MANY) / 2
    prompt, answer = next((p, a) for p, a in zip(MANY, answers, strict=True) if a is mixed[0])
    old = list(answer.versions).count(0)
    assert answer.logprobs[:old] == pytest.approx(
        logprobs(reference, prompt, answer, WARM.temperature)[:old], abs=1e-4
    )


def test_no_cached_prefix_outlives_its_weights(engine: Any, weights: Weights) -> None:
    engine.load(4, weights(4)).result(WAIT_S)
    expected = engine.generate(MANY[:8], GREEDY).result(WAIT_S)
    engine.load(0, weights(0)).result(WAIT_S)
    held = engine.generate(MANY[:8], WARM)  # these prompts' prefixes are in the cache, and in use
    until_generating(engine)
    engine.load(4, weights(4)).result(WAIT_S)
    assert engine.generate(MANY[:8], GREEDY).result(WAIT_S) == expected
    held.result(WAIT_S)


def test_requests_under_way_or_sent_to_a_sleeping_engine_continue_when_it_wakes(
    engine: Any, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering = by_seeds(engine)
    for _ in range(2):  # it sleeps already
        engine.sleep().result(WAIT_S)
    assert not answering.done()  # nothing was waited for
    tokens = engine.statistics.totals.generated_tokens
    with monkeypatch.context() as patch:
        be_patient(engine, patch, 0.2)  # no token is expected of it
        later = engine.generate(MANY[:8], GREEDY)
        time.sleep(0.6)
        engine.check()
    assert engine.statistics.totals.generated_tokens == tokens
    assert not answering.done()
    assert not later.done()
    figures = engine.load(5, weights(5)).result(WAIT_S)
    assert 0 < figures.load_s <= figures.pause_s
    versions = [set(answer.versions) for answer in answering.result(WAIT_S)]
    assert {0, 5} in versions  # begun before, ended after
    assert later.result(WAIT_S) == engine.generate(MANY[:8], GREEDY).result(WAIT_S)
    assert {version for answer in later.result() for version in answer.versions} == {5}
    engine.sleep().result(WAIT_S)
    engine.load(5, None).result(WAIT_S)  # with the weights that it had
    assert engine.generate(MANY[:8], GREEDY).result(WAIT_S) == later.result()


def test_engine_that_drains_sleeps_when_it_has_answered(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    updates(engine, monkeypatch, "drain")
    answering = by_seeds(engine)
    engine.sleep().result(WAIT_S)
    assert {version for answer in answering.result(WAIT_S) for version in answer.versions} == {0}
    late = engine.generate(MANY[:8], GREEDY)
    engine.check()
    assert not late.done()
    engine.load(0, None).result(WAIT_S)
    assert len(late.result(WAIT_S)) == 8


def test_refused_batch_fails_alone(engine: Any) -> None:
    for bad in ([5] * 513, [5, 10_000_000], [], [-1]):
        beside = engine.generate(MANY[:8], GREEDY)
        with pytest.raises(PromptRefusedError) as refused:
            engine.generate([*MANY[:8], bad], GREEDY).result(WAIT_S)
        assert refused.value.prompt == 8
        assert engine.generate(MANY[:8], GREEDY).result(WAIT_S) == beside.result(WAIT_S)
    for temperature in (-1.0, float("nan")):
        with pytest.raises(GeneratorError, match="refused settings"):
            engine.generate(MANY[:2], replace(WARM, temperature=temperature)).result(WAIT_S)
    for seeds in ([1], [1, 2, 3], [1, -1], [1, 2**63], [1, 2.5]):
        with pytest.raises(GeneratorError, match="refused settings: expected 2 seeds from 0"):
            engine.generate(MANY[:2], WARM, seeds).result(WAIT_S)
    until_idle(engine)


def test_cancelled_or_late_batch_is_worked_on_no_longer(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    long = replace(WARM, max_new_tokens=200)
    plain = engine.generate(MANY[:2], WARM, SEEDS[:2]).result(WAIT_S)
    answering = engine.generate(MANY, long)
    until_generating(engine)
    assert answering.cancel()
    with monkeypatch.context() as patch:
        be_patient(engine, patch, 0.0)  # it counts from the last token, and they keep coming
        late = engine.generate(MANY, long)
        with pytest.raises(GeneratorError, match=r"no token for 0 s .*of 64 prompts"):
            late.result(WAIT_S)
    assert engine.generate(MANY[:2], WARM, SEEDS[:2]).result(WAIT_S) == plain
    until_idle(engine)


def test_aborted_prompts_end_and_those_of_their_call_are_not_disturbed(engine: Any) -> None:
    from rl_bridge.generator.base import ABORTED

    plain = engine.generate(MANY, WARM, SEEDS).result(WAIT_S)
    ids = [f"prompt-{place}" for place in range(len(MANY))]
    answering = engine.generate(MANY, WARM, SEEDS, ids)
    until_generating(engine)
    tokens = engine.statistics.totals.generated_tokens
    engine.abort(ids[::2]).result(WAIT_S)
    answers = answering.result(WAIT_S)
    assert answers[1::2] == plain[1::2]
    assert answers[::2] == [ABORTED] * len(MANY[::2])
    until_idle(engine)
    left = sum(len(answer.tokens) for answer in plain[1::2])
    assert engine.statistics.totals.generated_tokens - tokens <= left + len(MANY)
    # One that waits to be passed to the engine never gets there; unknown ids and those of ended calls are ignored.
    engine.abort([*ids, "unknown"]).result(WAIT_S)

    async def aborted_behind_a_load() -> Any:
        async with engine._request_lock:
            waiting = engine.generate(MANY[:2], WARM, SEEDS[:2], ids[:2])
            await asyncio.wrap_future(engine.abort(ids[:1]))
        return await asyncio.wrap_future(waiting)

    assert engine._submit(aborted_behind_a_load()).result(WAIT_S) == [ABORTED, plain[1]]
    assert engine._requests == {}


class Unbound:
    """Like a proxy of Flask's outside of a request."""

    @property
    def __dict__(self) -> Any:
        raise RuntimeError("outside of its context")


async def test_loading_leaves_no_named_semaphore_and_looks_into_no_module(
    long_policy: Path, engine_environment: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tqdm import tqdm

    from rl_bridge.generator.vllm_api import EngineStatistics, build_engine

    proxies = ModuleType("proxies_of_a_request")
    proxies.request = Unbound()
    monkeypatch.setitem(sys.modules, proxies.__name__, proxies)
    monkeypatch.delattr(tqdm, "_lock", raising=False)  # the first bar of a process makes one
    monkeypatch.delattr("tqdm.std.TqdmDefaultWriteLock.mp_lock", raising=False)
    before = multiprocessing.get_start_method(allow_none=True)
    made: list[str] = []
    monkeypatch.setattr("multiprocessing.resource_tracker.register", lambda name, kind: made.append(name))
    multiprocessing.set_start_method("spawn", force=True)  # as in an actor's process
    try:
        engine = build_engine(
            engine_config(), str(long_policy), seed=0, statistics=EngineStatistics(), own_process=False
        )
        assert multiprocessing.get_start_method() == "spawn"
    finally:
        multiprocessing.set_start_method(before, force=True)
    await engine.end()
    assert made == []
    assert sys.modules[proxies.__name__] is proxies
