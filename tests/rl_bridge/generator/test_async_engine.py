"""A real engine in a process of its own: its tokens, new weights before and in the middle of answers, its end."""

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from generator_fixtures import engine_settings, perturbed, policy_service, prompts
from torch import Tensor

from rl_bridge.errors import GeneratorError, PromptRefused
from rl_bridge.types import Completion, SamplingSettings

pytestmark = [pytest.mark.heavy, pytest.mark.soak, pytest.mark.timeout(300)]

HERE = Path(__file__).parent
START_S = 200.0
WAIT_S = 60.0
"""A bound for what would hang otherwise; none is meant to come near it."""
WARM = SamplingSettings(temperature=0.8, max_new_tokens=40)
GREEDY = SamplingSettings(temperature=0.0, max_new_tokens=4)
MANY = prompts(64, length=300)
SEEDS = [10_000_000_000 + place for place in range(len(MANY))]


@pytest.fixture(scope="module")
def engine(long_policy: Path, engine_environment: None) -> Iterator[Any]:
    from rl_bridge.generator.async_engine import AsyncVllmEngine

    one = AsyncVllmEngine(
        engine_settings(
            long_policy,
            engine="vllm_async",
            max_length=512,
            weight_update="continue",
            kv_cache_bytes=64 << 20,
        )
    )
    one.start().result(START_S)
    pid = process_of(one)
    yield one
    one.close()
    wait_until(lambda: not runs(pid))


def process_of(engine: Any) -> int:
    (process,) = engine._llm.engine_core.resources.engine_manager.processes
    pid: int = process.pid
    return pid


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until(so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not so():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def until_generating(engine: Any) -> None:
    """Wait until the engine is in the middle of what it was asked for."""
    wait_until(lambda: bool(engine._doing["generate"]))
    time.sleep(0.05)  # some steps


def logprobs(model: Any, prompt: Sequence[int], answer: Completion, temperature: float) -> list[float]:
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *answer.tokens]])).logits[0] / temperature
    distribution = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    return distribution.gather(1, torch.tensor(answer.tokens).unsqueeze(1)).squeeze(1).tolist()


def test_logprobs_are_those_of_the_distribution_that_was_sampled_from(engine: Any, reference: Any) -> None:
    batch = prompts(20)
    for prompt, answer in zip(batch, engine.generate(batch, WARM).result(WAIT_S), strict=True):
        assert len(answer.tokens) == 40
        assert answer.logprobs == pytest.approx(logprobs(reference, prompt, answer, 0.8), abs=1e-4)
        assert set(answer.versions) == {0}


def test_a_seed_decides_an_answer_whatever_the_batch(engine: Any) -> None:
    together = engine.generate(MANY, WARM, SEEDS).result(WAIT_S)
    parts = [
        engine.generate(MANY[end - 3 : end][::-1], WARM, SEEDS[end - 3 : end][::-1])
        for end in range(len(MANY), 1, -3)
    ]
    assert list(itertools.chain.from_iterable(part.result(WAIT_S) for part in parts)) == together[:0:-1]
    drawn = engine.generate([MANY[0]] * 3, WARM).result(WAIT_S)
    assert len({tuple(answer.tokens) for answer in drawn}) == 3


def test_an_answer_goes_on_under_new_weights(
    engine: Any, reference: Any, weights: Callable[[int], dict[str, Tensor]]
) -> None:
    from transformers import Qwen3ForCausalLM

    plain = engine.generate(MANY, WARM, SEEDS).result(WAIT_S)
    answering = engine.generate(MANY, WARM, SEEDS)
    until_generating(engine)
    figures = engine.load(3, weights(3)).result(WAIT_S)
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
            told, expected = (
                [value for value, v in zip(values, answer.versions, strict=True) if v == version]
                for values in (answer.logprobs, logprobs(models[version], prompt, answer, 0.8))
            )
            assert told == pytest.approx(expected, abs=1e-4)
    assert mixed > len(MANY) / 2


def test_what_is_interrupted_by_the_same_weights_ends_as_if_it_were_not(
    engine: Any, weights: Callable[[int], dict[str, Tensor]]
) -> None:
    plain = engine.generate(MANY, WARM, SEEDS).result(WAIT_S)
    answering = engine.generate(MANY, WARM, SEEDS)
    until_generating(engine)
    for _ in range(3):
        engine.load(0, weights(0)).result(WAIT_S)
    assert answering.result(WAIT_S) == plain


def test_no_cached_prefix_outlives_its_weights(
    engine: Any, weights: Callable[[int], dict[str, Tensor]]
) -> None:
    engine.load(4, weights(4)).result(WAIT_S)
    expected = engine.generate(MANY[:8], GREEDY).result(WAIT_S)
    engine.load(0, weights(0)).result(WAIT_S)
    held = engine.generate(MANY[:8], WARM)  # these prompts' prefixes are in the cache, and in use
    until_generating(engine)
    engine.load(4, weights(4)).result(WAIT_S)
    assert engine.generate(MANY[:8], GREEDY).result(WAIT_S) == expected
    held.result(WAIT_S)


def test_drained_what_was_asked_for_before_is_answered_by_the_old_weights(
    engine: Any, weights: Callable[[int], dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_settings", replace(engine._settings, weight_update="drain"))
    finished: list[str] = []
    earlier = [engine.generate(MANY, WARM) for _ in range(3)]
    loaded = engine.load(9, weights(9))
    for future in earlier:
        future.add_done_callback(lambda _: finished.append("answers"))
    loaded.add_done_callback(lambda _: finished.append("weights"))
    loaded.result(WAIT_S)
    later = engine.generate(MANY[:4], GREEDY)
    assert {answer.version for answer in later.result(WAIT_S)} == {9}
    assert {
        version for future in earlier for answer in future.result(WAIT_S) for version in answer.versions
    } == {0}
    assert finished[-1] == "weights"


@pytest.mark.parametrize(
    "bad",
    [[5] * 513, [5, 10_000_000], [], [-1]],
    ids=["too long", "out of the vocabulary", "empty", "negative"],
)
def test_a_refused_prompt_fails_its_own_batch_alone(engine: Any, bad: list[int]) -> None:
    beside = engine.generate(MANY[:8], GREEDY)
    refused = engine.generate([*MANY[:8], bad], GREEDY)
    with pytest.raises(PromptRefused) as error:
        refused.result(WAIT_S)
    assert error.value.prompt == 8
    assert engine.generate(MANY[:8], GREEDY).result(WAIT_S) == beside.result(WAIT_S)
    wait_until(lambda: engine._llm.get_num_unfinished_requests() == 0)


@pytest.mark.parametrize(
    ("how", "seeds"), [(replace(WARM, temperature=-1.0), None), (WARM, [1]), (WARM, [1, -1])]
)
def test_refused_settings_fail_their_own_batch_alone(
    engine: Any, how: SamplingSettings, seeds: list[int] | None
) -> None:
    with pytest.raises(GeneratorError, match="refused settings"):
        engine.generate(MANY[:2], how, seeds).result(WAIT_S)
    assert len(engine.generate(MANY[:2], GREEDY).result(WAIT_S)) == 2
    assert engine.generate([], GREEDY).result(WAIT_S) == []


def test_what_is_cancelled_or_late_is_worked_on_no_longer(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = replace(WARM, max_new_tokens=200)
    answering = engine.generate(MANY, long)
    until_generating(engine)
    assert answering.cancel()
    wait_until(lambda: engine._llm.get_num_unfinished_requests() == 0)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_settings", replace(engine._settings, timeout_s=0.1))
        late = engine.generate(MANY, long)
        with pytest.raises(GeneratorError, match=r"expected answers to 64 prompts within 0.1 s"):
            late.result(WAIT_S)
    wait_until(lambda: engine._llm.get_num_unfinished_requests() == 0)
    assert len(engine.generate(MANY[:2], GREEDY).result(WAIT_S)) == 2


def test_an_engine_that_stands_still_is_not_healthy(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.check()
    pid = process_of(engine)
    os.kill(pid, signal.SIGSTOP)
    try:
        monkeypatch.setattr(engine, "_settings", replace(engine._settings, timeout_s=1.5))
        wait_until(lambda: not healthy(engine))
        with pytest.raises(GeneratorError, match=r"expected the engine to make a step within 1.5 s"):
            engine.check()
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: healthy(engine))


def healthy(engine: Any) -> bool:
    try:
        engine.check()
    except GeneratorError:
        return False
    return True


def test_what_a_terminal_interrupts_is_left_to_its_owner(engine: Any) -> None:
    answering = engine.generate(MANY, WARM, SEEDS)
    until_generating(engine)
    os.kill(process_of(engine), signal.SIGINT)
    answers = answering.result(WAIT_S)
    assert engine.generate(MANY, WARM, SEEDS).result(WAIT_S) == answers


# The last of this engine, which does not live on.
def test_an_engine_whose_process_dies_tells_whoever_waits(engine: Any) -> None:
    waiting = [engine.generate(MANY, replace(WARM, max_new_tokens=200)) for _ in range(3)]
    until_generating(engine)
    os.kill(process_of(engine), signal.SIGKILL)
    for future in waiting:
        with pytest.raises(GeneratorError, match="the engine has failed"):
            future.result(WAIT_S)
    assert engine.ended.exception(WAIT_S) is not None
    assert engine._llm.engine_core.resources.ctx.closed
    for use in (engine.check, lambda: engine.generate(MANY, WARM), lambda: engine.load(1, {})):
        with pytest.raises(GeneratorError, match="the engine has failed"):
            use()


OWNER = """
import sys, threading
from rl_bridge.generator.async_engine import AsyncVllmEngine
from rl_bridge.generator.settings import EngineSettings

if __name__ == "__main__":
    engine = AsyncVllmEngine(EngineSettings(
        model_path=sys.argv[1], dtype="float32", max_length=512, max_num_seqs=64, kv_cache_bytes=32 << 20,
        gpu_memory_utilization=0.1, seed=0, engine="vllm_async",
    ))
    engine.start().result()
    (process,) = engine._llm.engine_core.resources.engine_manager.processes
    print("engine", process.pid, flush=True)
    sockets = engine._llm.engine_core.resources.ctx
    if sys.argv[2] == "close":
        engine.close()
        engine.ended.result(0)
        print("closed", process.is_alive(), sockets.closed, flush=True)
    threading.Event().wait()
"""


@pytest.mark.parametrize("how", ["kill", "close"])
def test_the_engines_process_ends_with_its_owner(
    long_policy: Path, engine_environment: None, tmp_path: Path, how: str
) -> None:
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    repository = str(HERE.parents[2])
    owner = subprocess.Popen(
        [sys.executable, str(script), str(long_policy), how],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": repository},
    )
    try:
        assert owner.stdout is not None
        pid = next(int(line.split()[1]) for line in owner.stdout if line.startswith("engine "))
        if how == "close":
            assert next(line for line in owner.stdout if line.startswith("closed")) == "closed False True\n"
        else:
            assert runs(pid)
            owner.kill()
        wait_until(lambda: not runs(pid))
    finally:
        owner.kill()
        owner.communicate()


def engine_below(pid: int) -> int:
    """The process of the engine that another one has started."""
    children = [
        int(word)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for word in (task / "children").read_text().split()
    ]
    (found,) = [child for child in children if b"EngineCore" in Path(f"/proc/{child}/cmdline").read_bytes()]
    return found


async def test_as_a_service_it_comes_back_with_the_current_weights(long_policy: Path, tmp_path: Path) -> None:
    from rl_bridge.generator.checkpoint import Checkpoint

    how: dict[str, Any] = {"engine": "vllm_async", "max_length": 512}
    async with policy_service(long_policy, tmp_path, **how) as (policy, store):
        first = await policy.generate_many.route(MANY[:4], GREEDY)
        assert {answer.version for answer in first} == {0}
        await store.put(1, perturbed(Checkpoint(long_policy).tensors(), seed=1))
        assert not (await policy.update_weights.fanout(1)).failed
        second = await policy.generate_many.route(MANY[:4], GREEDY)
        assert {answer.version for answer in second} == {1}
        engine = engine_below(policy.replicas[0].pids[0])
        os.kill(policy.replicas[0].pids[0], signal.SIGKILL)
        assert await policy.generate_many.route(MANY[:4], GREEDY) == second  # by the one that came after it
        assert not runs(engine)
        engine = engine_below(policy.replicas[0].pids[0])
        await policy.update_weights.fanout(0)
        assert await policy.generate_many.route(MANY[:4], GREEDY) == first
    wait_until(lambda: not runs(engine))
