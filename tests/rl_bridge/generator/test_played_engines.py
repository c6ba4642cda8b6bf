"""The calls that engines make to vLLM, their order and errors; vLLM is a fake."""

import asyncio
import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from generator_fixtures import WAIT_S, be_patient, engine_config, wait_until

from rl_bridge.errors import GeneratorError
from rl_bridge.generator import engine as engine_module
from rl_bridge.generator.engine import VllmEngine
from rl_bridge.generator.local_engine import LocalEngine
from rl_bridge.generator.vllm_api import EngineStatistics
from rl_bridge.generator.vllm_worker import WeightReceiver
from rl_bridge.types import SamplingSettings

HOW = SamplingSettings(temperature=1.0, max_new_tokens=4)
ENDLESS = replace(HOW, max_new_tokens=1_000_000)
VOCABULARY = 10
RUNNING = 2


def params(sampling: SamplingSettings, seeds: Any, *, prompts: int) -> list[int]:
    """Stands for vLLM's sampling parameters: how many tokens each prompt may get."""
    return [sampling.max_new_tokens] * prompts


def answer_of(tokens: int, token: int, versions: Sequence[str]) -> Any:
    spans = []
    for version, run in itertools.groupby(enumerate(versions), key=lambda one: one[1]):
        places = [place for place, _ in run]
        spans.append(SimpleNamespace(version=version, start=places[0], end=places[-1] + 1))
    return SimpleNamespace(
        token_ids=[token] * tokens,
        logprobs=[{token: SimpleNamespace(logprob=-0.5)}] * tokens,
        weight_versions=spans,
        finish_reason="length",
    )


@dataclass(eq=False)
class Request:
    request_id: str
    tokens: int
    prompt: Sequence[int]
    versions: list[str] = field(default_factory=list)
    answered: "asyncio.Future[Any] | None" = None

    async def get(self) -> Any:
        assert self.answered is not None
        return await self.answered

    def step(self, version: str, *, last: bool = False) -> Any:
        """Sample a token; returns the output if it is the last one."""
        self.versions.append(version)
        if len(self.versions) < self.tokens and not last:
            return None
        answer = answer_of(len(self.versions), self.prompt[0], self.versions)
        return SimpleNamespace(request_id=self.request_id, finished=True, outputs=[answer])


class PlayedLLM:
    """Does what `AsyncLLM` does: a token a step of each of the first requests, unless it is paused."""

    def __init__(self, statistics: EngineStatistics) -> None:
        self.model_config = SimpleNamespace(get_vocab_size=lambda: VOCABULARY)
        self.statistics = statistics
        self.calls: list[str] = []
        self.requests: dict[str, Request] = {}
        self.version = "?"
        self.paused = False
        self.weights: dict[str, Any] = {}
        self.failure: Exception | None = None
        self.breaks = False
        self.enough = False
        self.stands_still = asyncio.Event()
        self.stands_still.set()
        self.stepping = asyncio.ensure_future(self.step_on())

    async def step_on(self) -> None:
        while True:
            await asyncio.sleep(0.001)
            if self.paused:
                continue
            for request in list(self.requests.values())[:RUNNING]:
                if (output := request.step(self.version, last=self.enough)) is not None:
                    del self.requests[request.request_id]
                    request.answered.set_result(output)

    async def add_request(
        self, request_id: str, prompt: dict[str, Any], how: Any, lora_request: None = None
    ) -> Request:
        await asyncio.sleep(0)
        await self.stands_still.wait()
        self.calls.append(f"add {prompt['prompt_token_ids'][0]}")
        request = self.requests[request_id] = Request(request_id, how, prompt["prompt_token_ids"])
        request.answered = asyncio.get_running_loop().create_future()
        return request

    async def abort(self, ids: list[str], *, internal: bool) -> None:
        assert internal
        if self.failure is not None:
            raise self.failure
        self.calls.append(f"abort {len(ids)}")
        for one in ids:
            self.requests.pop(one, None)

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self.calls.append(f"pause {mode}")
        assert (mode, clear_cache) == ("keep", True)
        self.paused = True
        await asyncio.sleep(0.001)

    async def resume_generation(self) -> None:
        self.calls.append("resume")
        self.paused = False

    async def collective_rpc(self, method: str, args: Any) -> None:
        self.calls.append(method)
        if self.breaks:
            raise RuntimeError("a shape does not fit")
        await asyncio.sleep(0.02)
        await self.stands_still.wait()
        self.weights = {name: tensor.clone() for name, tensor in WeightReceiver().read(args[0]).items()}

    async def update_weight_version(self, version: str) -> None:
        self.calls.append(f"version {version}")
        self.version = version

    async def check_health(self) -> None:
        if self.failure is not None:
            raise self.failure

    async def is_paused(self) -> bool:
        return self.paused

    async def end(self) -> None:
        self.calls.append("shutdown")
        self.stepping.cancel()


@pytest.fixture(autouse=True)
def _without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "POLL_INTERVAL_S", 0.01)
    monkeypatch.setattr(engine_module, "sampling_params", params)
    monkeypatch.setattr(engine_module, "request_error_types", lambda: (ValueError,))


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[VllmEngine]:
    monkeypatch.setattr(engine_module, "build_engine", lambda *_, statistics, **__: PlayedLLM(statistics))
    monkeypatch.setattr(engine_module, "end_engine", PlayedLLM.end)
    one = VllmEngine(engine_config(), "nowhere", seed=0, own_process=True)
    one.start().result(WAIT_S)
    yield one
    one.close()


def played(engine: VllmEngine) -> PlayedLLM:
    llm: PlayedLLM = engine._llm
    return llm


def calls(engine: VllmEngine) -> list[str]:
    return played(engine).calls


def test_answers_come_in_order_until_the_engine_is_closed(engine: VllmEngine) -> None:
    answers = engine.generate([[3], [1], [2]], HOW).result(WAIT_S)
    assert [answer.tokens for answer in answers] == [[3] * 4, [1] * 4, [2] * 4]
    assert [answer.versions for answer in answers] == [[0] * 4] * 3
    assert answers[0].logprobs == [-0.5] * 4
    assert engine.generate([], HOW).result(WAIT_S) == []
    assert calls(engine) == ["version 0", "add 3", "add 1", "add 2"]
    llm = played(engine)
    engine.close()
    assert (engine.ended.result(0), llm.calls[-1]) == (None, "shutdown")


def test_drained_old_weights_answer_what_was_asked_for_before(engine: VllmEngine) -> None:
    earlier = [engine.generate([[1], [2]], ENDLESS) for _ in range(3)]  # more than are worked on at a time
    wait_until(lambda: len(played(engine).requests) == 6)
    loading = engine.load(5, {"weight": torch.full((3,), 5.0)})
    time.sleep(0.05)
    assert "pause keep" not in calls(engine)
    played(engine).enough = True
    metrics = loading.result(WAIT_S)
    played(engine).enough = False
    assert all(future.done() for future in earlier)
    later = engine.generate([[3]], HOW).result(WAIT_S)
    assert {answer.version for future in earlier for answer in future.result()} == {0}
    assert later[0].versions == [5] * 4
    assert engine.version == 5
    assert played(engine).weights["weight"].tolist() == [5.0, 5.0, 5.0]
    assert 0.02 <= metrics.load_s <= metrics.pause_s
    assert metrics.transport_s > 0.0
    loading_calls = [call for call in calls(engine) if not call.startswith("add")]
    assert loading_calls == ["version 0", "pause keep", "load_handover", "version 5", "resume"]


def test_load_whose_caller_leaves_is_finished_and_prompts_wait_for_it(engine: VllmEngine) -> None:
    played(engine).stands_still.clear()
    loading = engine.load(1, {})
    wait_until(lambda: "load_handover" in calls(engine))
    answering = engine.generate([[1]], HOW)
    assert loading.cancel()
    assert engine._loop is not None
    engine._loop.call_soon_threadsafe(played(engine).stands_still.set)
    assert answering.result(WAIT_S)[0].versions == [1] * 4
    assert calls(engine)[-2:] == ["resume", "add 1"]


@pytest.mark.parametrize(
    ("breaks", "reason"),
    [(True, r"it failed half-way: a shape does not fit"), (False, r"within 0\.2 s, it has not")],
)
def test_load_that_fails_half_way_or_does_not_end_ends_the_engine(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch, breaks: bool, reason: str
) -> None:
    if breaks:
        played(engine).breaks = True
    else:
        be_patient(engine, monkeypatch, 0.1)
        played(engine).stands_still.clear()
    with pytest.raises(GeneratorError, match=f"load version 1.* {reason}"):
        engine.load(1, {}).result(WAIT_S)
    with pytest.raises(GeneratorError, match=reason):
        engine.ended.result(WAIT_S)
    with pytest.raises(GeneratorError, match=reason):
        engine.generate([[1]], HOW)
    assert calls(engine)[-1] == "shutdown"
    assert engine.version == 0


def test_engine_that_samples_is_not_late_and_one_that_does_not_is(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_patient(engine, monkeypatch, 0.05)
    played(engine).paused = True
    samples, looks, since_the_last = True, 0, engine.statistics.seconds_without_token

    def look(since: float) -> float:
        nonlocal looks
        looks += 1
        if samples:  # for others, just now
            engine.statistics.last_token_at = time.monotonic()
        return since_the_last(since)

    monkeypatch.setattr(engine.statistics, "seconds_without_token", look)
    asked = engine.generate([[1]], HOW)
    wait_until(lambda: looks == 4)
    assert not asked.done()
    samples = False
    with pytest.raises(GeneratorError, match=r"has sampled no token for 0\.05 s .*not all of 1 prompts"):
        asked.result(WAIT_S)


def test_engine_that_does_not_abort_in_time_ends(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(ids: list[str], *, internal: bool) -> None:
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(engine_module, "ABORT_TIMEOUT_S", 0.01)
    played(engine).paused = True
    be_patient(engine, monkeypatch, 0.05)
    monkeypatch.setattr(played(engine), "abort", hang)
    with pytest.raises(GeneratorError, match=r"no token for 0\.05 s|abort requests within"):
        engine.generate([[1]], ENDLESS).result(WAIT_S)
    assert "abort requests within 0.01 s" in str(engine.ended.exception(WAIT_S))


def test_death_of_the_engine_fails_all_waiting_calls(engine: VllmEngine) -> None:
    waiting = [engine.generate([[1]], ENDLESS) for _ in range(3)]
    wait_until(lambda: len(played(engine).requests) == 3)
    played(engine).failure = RuntimeError("its process is gone")
    for future in waiting:
        with pytest.raises(GeneratorError, match="the engine has failed: its process is gone"):
            future.result(WAIT_S)
    assert str(engine.ended.exception(WAIT_S)) == "its process is gone"
    with pytest.raises(GeneratorError, match="its process is gone"):
        engine.check()


class PlayedCore:
    """Does what `LLMEngine` does for the engine in this process: a token a step of each request."""

    def __init__(self, statistics: EngineStatistics) -> None:
        self.model_config = SimpleNamespace(get_vocab_size=lambda: VOCABULARY)
        self.statistics = statistics
        self.engine_core = SimpleNamespace(shutdown=lambda: None)
        self.requests: dict[str, Request] = {}
        self.version = "?"
        self.broken = False
        self.may_step = threading.Event()
        self.may_step.set()

    def set_weight_version(self, version: str) -> None:
        self.version = version

    def add_request(self, request_id: str, prompt: dict[str, Any], how: int, lora_request: None) -> None:
        self.requests[request_id] = Request(request_id, how, prompt["prompt_token_ids"])

    def step(self) -> list[Any]:
        assert self.may_step.wait(WAIT_S)
        if self.broken:
            raise RuntimeError("a step is broken")
        self.statistics.last_token_at = time.monotonic()
        outputs = [output for one in self.requests.values() if (output := one.step(self.version))]
        for output in outputs:
            del self.requests[output.request_id]
        return outputs

    def abort_request(self, ids: list[str]) -> None:
        for one in ids:
            self.requests.pop(one, None)


@pytest.fixture
def inner(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[VllmEngine, PlayedCore]]:
    """The engine in this process."""
    cores: list[PlayedCore] = []

    def build(*_: Any, statistics: EngineStatistics, **__: Any) -> LocalEngine:
        cores.append(PlayedCore(statistics))
        return LocalEngine(cores[0])

    monkeypatch.setattr(engine_module, "build_engine", build)
    one = VllmEngine(engine_config(), "nowhere", seed=0)
    one.start().result(WAIT_S)
    yield one, cores[0]
    cores[0].may_step.set()
    one.close()


def test_inner_engine_at_one_step_for_too_long_is_not_healthy(
    inner: tuple[VllmEngine, PlayedCore], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, core = inner
    engine.check()
    core.may_step.clear()
    answering = engine.generate([[1]], HOW)
    wait_until(lambda: core.requests)
    engine.check()
    with monkeypatch.context() as patch:
        be_patient(engine, patch, 0.01)
        time.sleep(0.05)
        with pytest.raises(GeneratorError, match=r"expected the engine to make a step within 0.01 s"):
            engine.check()
    core.may_step.set()
    assert len(answering.result(WAIT_S)) == 1
    engine.check()


def test_failed_step_of_the_inner_engine_fails_all_waiting_calls(
    inner: tuple[VllmEngine, PlayedCore],
) -> None:
    engine, core = inner
    core.may_step.clear()
    waiting = [engine.generate([[1], [2]], HOW) for _ in range(2)]
    core.broken = True
    core.may_step.set()
    for future in waiting:
        with pytest.raises(GeneratorError, match="the engine has failed: a step is broken"):
            future.result(WAIT_S)
    assert str(engine.ended.exception(WAIT_S)) == "a step is broken"


async def test_inner_engine_whose_step_failed_is_not_healthy_though_nobody_waited(
    inner: tuple[VllmEngine, PlayedCore],
) -> None:
    core = PlayedCore(inner[1].statistics)
    core.broken = True
    local = LocalEngine(core)
    await local.check_health()
    await local.add_request("1", {"prompt_token_ids": [1]}, 1, lora_request=None)

    async def look() -> None:
        while True:
            await local.check_health()
            await asyncio.sleep(0)

    with pytest.raises(RuntimeError, match="a step is broken"):
        await asyncio.wait_for(look(), WAIT_S)


def test_engine_that_cannot_start_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise GeneratorError("vLLM cannot start on 'nowhere'")

    monkeypatch.setattr(engine_module, "build_engine", fail)
    engine = VllmEngine(engine_config(), "nowhere", seed=0)
    with pytest.raises(GeneratorError, match="vLLM cannot start"):
        engine.start().result(WAIT_S)
    assert "vLLM cannot start" in str(engine.ended.exception(WAIT_S))
    with pytest.raises(GeneratorError, match="the engine has failed"):
        engine.generate([[1]], HOW)
    engine.close()
