"""A real engine on a tiny checkpoint: what it says of its tokens, new weights in place, refusals."""

import multiprocessing
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from generator_fixtures import MAX_LENGTH, engine_settings, prompts
from torch import Tensor

from rl_bridge.errors import GeneratorError
from rl_bridge.types import Completion, SamplingSettings

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(300)]

WAIT_S = 60.0
"""A bound for what would hang otherwise; none is meant to come near it."""


@pytest.fixture(scope="module")
def engine(tiny_policy: Path, engine_environment: None) -> Iterator[Any]:
    from rl_bridge.generator.engine import VllmEngine

    one = VllmEngine(engine_settings(tiny_policy))
    one.start().result(110)
    yield one
    one.close()
    assert not one._thread.is_alive()


@pytest.fixture(scope="module")
def reference(tiny_policy: Path) -> Any:
    from transformers import Qwen3ForCausalLM

    return Qwen3ForCausalLM.from_pretrained(str(tiny_policy), dtype=torch.float32).eval()


def sampling(temperature: float = 1.0, tokens: int = 1, stop: tuple[int, ...] = ()) -> SamplingSettings:
    return SamplingSettings(temperature=temperature, max_new_tokens=tokens, stop_token_ids=stop)


def ask(engine: Any, batch: Sequence[Sequence[int]], how: SamplingSettings) -> list[Completion]:
    answers: list[Completion] = engine.generate(batch, how).result(WAIT_S)
    return answers


def expected_logprobs(
    model: Any, prompt: Sequence[int], answer: Completion, temperature: float
) -> list[float]:
    tokens = torch.tensor([[*prompt, *answer.tokens]])
    with torch.no_grad():
        distribution = torch.log_softmax(model(tokens).logits[0] / temperature, -1)
    first = len(prompt) - 1
    return [distribution[first + place, token].item() for place, token in enumerate(answer.tokens)]


def test_loading_makes_no_semaphore_with_a_name(
    tiny_policy: Path, engine_environment: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tqdm import tqdm

    from rl_bridge.generator.vllm_api import build_engine

    monkeypatch.delattr(tqdm, "_lock", raising=False)  # the first bar of a process makes one
    monkeypatch.delattr("tqdm.std.TqdmDefaultWriteLock.mp_lock", raising=False)
    before = multiprocessing.get_start_method(allow_none=True)
    made: list[str] = []
    monkeypatch.setattr("multiprocessing.resource_tracker.register", lambda name, kind: made.append(name))
    multiprocessing.set_start_method("spawn", force=True)  # as in an actor's process
    try:
        engine = build_engine(engine_settings(tiny_policy))
        assert multiprocessing.get_start_method() == "spawn"
    finally:
        multiprocessing.set_start_method(before, force=True)
    engine.engine_core.shutdown()
    assert made == []


class Unbound:
    """Like a proxy of Flask's outside of a request."""

    @property
    def __dict__(self) -> Any:
        raise RuntimeError("outside of its context")


def test_it_loads_beside_modules_that_must_not_be_looked_at(
    tiny_policy: Path, engine_environment: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rl_bridge.generator.vllm_api import build_engine

    proxies = ModuleType("proxies_of_a_request")
    proxies.request = Unbound()
    monkeypatch.setitem(sys.modules, proxies.__name__, proxies)
    build_engine(engine_settings(tiny_policy)).engine_core.shutdown()
    assert sys.modules[proxies.__name__] is proxies


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_distribution_that_was_sampled_from(
    engine: Any, reference: Any, temperature: float
) -> None:
    batch = prompts(40)
    answers = ask(engine, batch, sampling(temperature, tokens=5))
    worst = 0.0
    for prompt, answer in zip(batch, answers, strict=True):
        assert 1 <= len(answer.tokens) == len(answer.logprobs) <= 5  # the checkpoint's end token ends it
        for told, expected in zip(
            answer.logprobs, expected_logprobs(reference, prompt, answer, temperature), strict=True
        ):
            worst = max(worst, abs(told - expected))
    assert worst <= 1e-4


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_trainer_and_engine_agree(engine: Any, tiny_policy: Path, tmp_path: Path, temperature: float) -> None:
    """The metric of every iteration: at most 1e-4 in fp32."""
    from rl_bridge.buffer.batch import TrainBatch
    from rl_bridge.config import AlgorithmConfig, TrainerConfig
    from rl_bridge.reference.reference import Reference
    from rl_bridge.tokens.accumulator import training_rows
    from rl_bridge.trainer.settings import TrainerSettings
    from rl_bridge.types import Ending, Trajectory, Turn

    batch = prompts(30)
    answers = ask(engine, batch, sampling(temperature, tokens=4))
    rows = [
        row
        for index, (prompt, answer) in enumerate(zip(batch, answers, strict=True))
        for row in training_rows(
            Trajectory(
                seed=0, turns=[Turn(prompt=prompt, completion=answer)], ending=Ending.COMPLETED, reward=0.0
            ),
            advantage=1.0,
            index=index,
        )
    ]
    laid_out = TrainBatch.from_samples(rows)
    trainer = Reference(
        TrainerSettings(
            model_path=str(tiny_policy),
            dtype="float32",
            folder=str(tmp_path),
            max_length=MAX_LENGTH,
            max_loss_tokens=4,
            temperature=temperature,
            seed=0,
            trainer=TrainerConfig(),
            algorithm=AlgorithmConfig(),
        )
    )
    assert abs(trainer.logprobs(laid_out) - laid_out.old_logprobs).max() <= 1e-4


def test_sampling_follows_the_distribution(engine: Any, reference: Any) -> None:
    (prompt,) = prompts(1)
    answers = ask(engine, [prompt] * 3000, sampling(1.0))
    counts = torch.bincount(
        torch.tensor([answer.tokens[0] for answer in answers]), minlength=reference.config.vocab_size
    )
    with torch.no_grad():
        expected = torch.softmax(reference(torch.tensor([prompt])).logits[0, -1], -1) * 3000
    # Pearson's statistic: of V - 1 degrees of freedom, so V + 6 sqrt(2 V) is six deviations away.
    statistic = ((counts - expected).square() / expected).sum().item()
    size = len(expected)
    assert statistic < size + 6 * (2 * size) ** 0.5


def test_temperature_zero_takes_the_most_likely(engine: Any, reference: Any) -> None:
    batch = prompts(20)
    answers = ask(engine, batch, sampling(0.0))
    assert ask(engine, batch, sampling(0.0)) == answers
    for prompt, answer in zip(batch, answers, strict=True):
        with torch.no_grad():
            assert answer.tokens[0] == reference(torch.tensor([prompt])).logits[0, -1].argmax().item()


def test_a_stop_token_ends_an_answer_and_is_part_of_it(engine: Any) -> None:
    (prompt,) = prompts(1)
    (greedy,) = ask(engine, [prompt], sampling(0.0, tokens=6))
    assert (len(greedy.tokens), greedy.stopped) == (6, False)
    stop = greedy.tokens[2]
    (stopped,) = ask(engine, [prompt], sampling(0.0, tokens=6, stop=(stop,)))
    first = list(greedy.tokens).index(stop)
    assert (list(stopped.tokens), stopped.stopped) == (list(greedy.tokens[: first + 1]), True)


def test_answers_come_in_the_order_of_the_prompts(engine: Any) -> None:
    batch = prompts(70)  # more than the engine works on at once
    together = ask(engine, batch, sampling(0.0))
    assert [answer.tokens for answer in together] == [
        ask(engine, [prompt], sampling(0.0))[0].tokens for prompt in batch
    ]


def test_no_prompt_is_no_answer(engine: Any) -> None:
    assert ask(engine, [], sampling()) == []


def weights(reference: Any, *, seed: int | None = None) -> dict[str, Tensor]:
    state = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        for tensor in state.values():
            tensor.add_(0.2 * torch.randn(tensor.shape, generator=generator))
    return state


def test_new_weights_in_place(engine: Any, reference: Any) -> None:
    from transformers import Qwen3ForCausalLM

    batch = prompts(20)
    before = ask(engine, batch, sampling(0.0, tokens=3))
    state = weights(reference, seed=1)
    try:
        engine.load(7, state).result(WAIT_S)
        after = ask(engine, batch, sampling(0.7, tokens=3))
        changed = Qwen3ForCausalLM(reference.config).eval()
        changed.load_state_dict(state)
        for prompt, answer in zip(batch, after, strict=True):
            assert answer.version == 7
            assert answer.logprobs == pytest.approx(expected_logprobs(changed, prompt, answer, 0.7), abs=1e-4)
    finally:
        engine.load(0, weights(reference)).result(WAIT_S)
    # And back: no cached answer of the weights in between, nor any of their copies, is left.
    again = ask(engine, batch, sampling(0.0, tokens=3))
    assert [answer.tokens for answer in again] == [answer.tokens for answer in before]
    assert {answer.version for answer in again} == {0}
    for prompt, answer in zip(batch, again, strict=True):
        assert expected_logprobs(reference, prompt, answer, 1.0) is not None


def test_weights_wait_for_what_was_asked_for_before(engine: Any, reference: Any) -> None:
    batch = prompts(64)
    earlier = [engine.generate(batch, sampling(1.0, tokens=20)) for _ in range(3)]
    loaded = engine.load(9, weights(reference, seed=2))
    later = engine.generate(batch, sampling(1.0, tokens=2))
    finished: list[str] = []
    for number, future in enumerate(earlier):
        future.add_done_callback(lambda _, number=number: finished.append(f"batch {number}"))
    loaded.add_done_callback(lambda _: finished.append("weights"))
    try:
        assert {answer.version for answer in later.result(WAIT_S)} == {9}
        assert {answer.version for future in earlier for answer in future.result(WAIT_S)} == {0}
        assert finished[-1] == "weights"
    finally:
        engine.load(0, weights(reference)).result(WAIT_S)


@pytest.mark.parametrize(
    "bad",
    [
        [5] * (MAX_LENGTH + 1),
        [5, 10_000_000],
        [],
        [-1],
    ],
    ids=["too long", "out of the vocabulary", "empty", "negative"],
)
def test_a_refused_prompt_fails_its_own_batch_alone(engine: Any, bad: list[int]) -> None:
    good = prompts(10)
    beside = engine.generate(good, sampling(0.0, tokens=8))
    refused = engine.generate([*good, bad], sampling(0.0))
    after = engine.generate(good, sampling(0.0, tokens=8))
    with pytest.raises(GeneratorError, match="refused a prompt"):
        refused.result(WAIT_S)
    assert beside.result(WAIT_S) == after.result(WAIT_S)
    assert not engine._batches


@pytest.mark.parametrize("bad", [sampling(-1.0), sampling(1.0, tokens=0), sampling(float("nan"))])
def test_refused_settings_fail_their_own_batch_alone(engine: Any, bad: SamplingSettings) -> None:
    refused = engine.generate(prompts(2), bad)
    with pytest.raises(GeneratorError, match="refused"):
        refused.result(WAIT_S)
    assert len(ask(engine, prompts(2), sampling())) == 2


def test_a_cancelled_batch_takes_nobody_along(engine: Any) -> None:
    first = engine.generate(prompts(64), sampling(1.0, tokens=20))
    futures = [engine.generate(prompts(2), sampling(1.0)) for _ in range(5)]
    cancelled = [future.cancel() for future in futures[::2]]
    assert len(first.result(WAIT_S)) == 64
    for future, gone in zip(futures[::2], cancelled, strict=True):
        assert gone or len(future.result(WAIT_S)) == 2
    for future in futures[1::2]:
        assert len(future.result(WAIT_S)) == 2


def test_too_many_batches_are_refused_and_the_engine_lives(engine: Any, reference: Any) -> None:
    from rl_bridge.generator.engine import MAX_WAITING_BATCHES

    futures = [engine.generate(prompts(64), sampling(1.0, tokens=20))]
    futures.append(engine.load(0, weights(reference)))  # until it is through, nothing else is taken
    with pytest.raises(GeneratorError, match="batches waiting"):
        futures.extend(engine.generate([[5]], sampling()) for _ in range(MAX_WAITING_BATCHES * 2))
    for future in futures:
        future.result(WAIT_S)
    assert len(ask(engine, prompts(2), sampling())) == 2


def test_a_checkpoint_that_is_none_is_an_error_not_a_hang(engine: Any, tmp_path: Path) -> None:
    from rl_bridge.generator.engine import VllmEngine

    broken = VllmEngine(engine_settings(tmp_path))
    ready = broken.start()
    with pytest.raises(GeneratorError, match="vLLM cannot start"):
        ready.result(WAIT_S)
    with pytest.raises(GeneratorError, match="the engine has failed"):
        broken.generate([[1]], sampling()).result(WAIT_S)
    broken.close()


class _Breaking:
    """Stands in front of the real engine and fails on request, as a bug in it would."""

    def __init__(self, engine: Any, method: str) -> None:
        self._engine, self._method = engine, method

    def __getattr__(self, name: str) -> Any:
        if name == self._method:
            raise RuntimeError(f"{name} is broken")
        return getattr(self._engine, name)


# Last, because the engine does not live on.
@pytest.mark.parametrize("method", ["add_request", "step", "collective_rpc"])
def test_an_engine_that_breaks_reaches_whoever_waits(engine: Any, reference: Any, method: str) -> None:
    from rl_bridge.generator.engine import VllmEngine

    one = VllmEngine.__new__(VllmEngine)
    VllmEngine.__init__(one, engine._settings)
    one._engine = _Breaking(engine._engine, method)
    one._thread = threading.Thread(target=_serve_without_building, args=(one,), daemon=True)
    futures = [one.generate(prompts(2), sampling()), one.load(1, {}), one.generate(prompts(2), sampling())]
    one._thread.start()
    for future in futures[(1 if method == "collective_rpc" else 0) :]:
        assert isinstance(future.exception(WAIT_S), (GeneratorError, RuntimeError))
    one._thread.join(WAIT_S)
    with pytest.raises(GeneratorError, match="the engine has failed"):
        one.generate(prompts(2), sampling())


def _serve_without_building(one: Any) -> None:
    import rl_bridge.generator.engine as module

    built, original = one._engine, module.build_engine
    module.build_engine = lambda settings: built
    try:
        one._run()
    finally:
        module.build_engine = original


def test_close_fails_what_waits_and_refuses_what_comes(engine: Any) -> None:
    waiting = [engine.generate(prompts(64), sampling(1.0, tokens=20)) for _ in range(3)]
    engine.close()
    for future in waiting:
        error = future.exception(WAIT_S)
        assert error is None or isinstance(error, GeneratorError)
    with pytest.raises(GeneratorError, match="closed"):
        engine.generate(prompts(1), sampling())
    engine.close()  # once more does no harm
