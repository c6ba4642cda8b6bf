"""A server as an engine, against a stand-in: its answers are used as they are, or refused."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from completions_server import MODEL, VOCABULARY, Behaviour, StandIn, completions_server, distribution
from generator_fixtures import MAX_LENGTH, WAIT_S, engine_config, wait_until

from rl_bridge.config import RolloutConfig
from rl_bridge.errors import ConfigError, GeneratorError, PromptRefusedError, WeightsError
from rl_bridge.generator.base import ABORTED
from rl_bridge.generator.endpoint import Endpoint, EndpointEngine
from rl_bridge.types import SamplingSettings

WARM = SamplingSettings(temperature=0.7, max_new_tokens=6, stop_token_ids=(3,))
PROMPTS = [[1, 2, token] for token in range(12)]


@pytest.fixture(scope="module")
def serving() -> Iterator[StandIn]:
    with completions_server() as stand_in:
        yield stand_in


@pytest.fixture
def server(serving: StandIn) -> StandIn:
    serving.behaviour = Behaviour()
    serving.served.clear()
    serving.most_at_once = 0
    return serving


def asking(server: StandIn, **endpoint: Any) -> tuple[Endpoint, RolloutConfig]:
    named = {"url": server.url, "model": MODEL}
    return Endpoint(**named | endpoint), engine_config(max_num_seqs=4).rollout


@pytest.fixture
def engine(server: StandIn) -> Iterator[EndpointEngine]:
    one = EndpointEngine(*asking(server))
    one.start().result(WAIT_S)
    yield one
    one.close()


def test_answers_are_what_the_server_sampled(server: StandIn, engine: EndpointEngine) -> None:
    seeds = list(range(len(PROMPTS)))
    answers = engine.generate(PROMPTS, WARM, seeds).result(WAIT_S)
    log = {tuple(one.body["prompt"]): one for one in server.served if "seed" in one.body}
    for place, (prompt, answer) in enumerate(zip(PROMPTS, answers, strict=True)):
        served = log[tuple(prompt)]
        assert served.body["seed"] == place
        assert (answer.tokens, answer.versions) == (served.tokens, [0] * len(served.tokens))
        expected = [
            distribution([*prompt, *answer.tokens[:index]], 0.7)[token]
            for index, token in enumerate(answer.tokens)
        ]
        assert answer.logprobs == pytest.approx(expected, abs=1e-6)
        assert answer.stopped == (answer.tokens[-1] == 3)
    assert {answer.stopped for answer in answers} == {True, False}
    assert engine.generate(PROMPTS, WARM, seeds).result(WAIT_S) == answers
    assert server.most_at_once <= 4
    assert engine.generate([], WARM).result(WAIT_S) == []
    with pytest.raises(GeneratorError, match="expected 2 seeds, got 1"):
        engine.generate([[1], [2]], WARM, [3]).result(WAIT_S)


def test_no_more_tokens_are_requested_than_the_context_has_room_for(
    server: StandIn, engine: EndpointEngine
) -> None:
    server.behaviour = Behaviour(max_model_len=MAX_LENGTH)
    long, full = [1] * (MAX_LENGTH - 2), [1] * (MAX_LENGTH - 1)
    answers = engine.generate([PROMPTS[0], long, full], replace(WARM, stop_token_ids=())).result(WAIT_S)
    assert [len(answer.tokens) for answer in answers] == [6, 2, 1]
    with pytest.raises(PromptRefusedError, match="longer than the context"):
        engine.generate([[1] * MAX_LENGTH], WARM).result(WAIT_S)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"processed": False}, "at the temperature 0.7 .* got those at 1"),
        ({"top_k": 2}, "top-p, top-k or min-p"),
    ],
)
def test_server_that_would_mislead_is_refused(
    server: StandIn, engine: EndpointEngine, fault: dict[str, Any], words: str
) -> None:
    server.behaviour = Behaviour(**fault)
    with pytest.raises(ConfigError, match=words):
        engine.generate(PROMPTS[:3], WARM).result(WAIT_S)


def test_refused_prompt_is_named(server: StandIn, engine: EndpointEngine) -> None:
    with pytest.raises(PromptRefusedError, match="out of the vocabulary") as refused:
        engine.generate([[1], [2], [VOCABULARY]], WARM).result(WAIT_S)
    assert refused.value.prompt == 2
    assert len(engine.generate([[1]], WARM).result(WAIT_S)) == 1


def test_aborted_prompt_is_requested_no_longer_and_the_rest_of_its_call_is_answered(
    server: StandIn, engine: EndpointEngine
) -> None:
    server.behaviour = Behaviour(busy=1_000_000)
    answering = engine.generate(PROMPTS[:3], WARM, ids=["a", "b", "c"])
    wait_until(lambda: engine._http is not None and engine._http.trouble != "no answer")
    engine.abort(["b", "unknown"]).result(WAIT_S)
    server.behaviour = Behaviour()
    first, aborted, last = answering.result(WAIT_S)
    assert aborted is ABORTED
    assert PROMPTS[1] not in [one.body["prompt"] for one in server.served]
    assert {tuple(one.body["prompt"]) for one in server.served} == {tuple(PROMPTS[0]), tuple(PROMPTS[2])}
    assert first.tokens
    assert last.tokens
    assert engine._tasks == {}


@pytest.fixture
def make_late(monkeypatch: pytest.MonkeyPatch) -> Callable[[EndpointEngine], None]:
    """Has the deadline pass once there was trouble, however long the machine takes for that."""
    deadlines: list[asyncio.Timeout] = []
    timeout = asyncio.timeout

    def recorded_timeout(seconds: float) -> asyncio.Timeout:
        deadlines.append(timeout(seconds))
        return deadlines[-1]

    def late(engine: EndpointEngine) -> None:
        loop = engine._loop
        assert loop is not None
        wait_until(lambda: engine._http is not None and engine._http.trouble != "no answer")
        loop.call_soon_threadsafe(lambda: deadlines[-1].reschedule(loop.time()))

    monkeypatch.setattr(asyncio, "timeout", recorded_timeout)
    return late


def test_answer_counts_while_another_call_that_is_late_is_ended(engine: EndpointEngine) -> None:
    async def be_late() -> None:
        async with engine._limit_time("an answer"):
            (deadline,) = engine._deadlines
            deadline.reschedule(0.0)
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.create_task(engine._generate([[1]], WARM, [0], ()))

    with pytest.raises(GeneratorError, match="expected an answer from"):
        engine._submit(be_late()).result(WAIT_S)


def test_deadline_error_names_the_last_trouble(
    server: StandIn, engine: EndpointEngine, make_late: Callable[[EndpointEngine], None]
) -> None:
    server.behaviour = Behaviour(busy=1_000_000)
    answering = engine.generate([[1]], WARM)
    make_late(engine)
    with pytest.raises(GeneratorError, match=r"within 300 s; last there was status 503: .*later"):
        answering.result(WAIT_S)
    server.behaviour = Behaviour()
    assert len(engine.generate([[1]], WARM).result(WAIT_S)) == 1


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"max_model_len": 16}, "rollout.max_length of at most 16"),
        ({"content": b'{"data": []}'}, "the model to be one of none"),
        ({"content": b"<html>"}, "to list models"),
    ],
)
def test_unusable_server_is_refused_at_the_start(server: StandIn, how: dict[str, Any], words: str) -> None:
    server.behaviour = Behaviour(**how)
    engine = EndpointEngine(*asking(server))
    with pytest.raises(ConfigError, match=words):
        engine.start().result(WAIT_S)
    engine.close()


def test_key_comes_from_the_environment(server: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    server.behaviour = Behaviour(key="secret")
    named = asking(server, key_variable="KEY_OF_THE_TEST")
    absent = EndpointEngine(*named)
    with pytest.raises(ConfigError, match=r"KEY_OF_THE_TEST \(Endpoint.key_variable\) to hold the key"):
        absent.start().result(WAIT_S)
    absent.close()
    monkeypatch.setenv("KEY_OF_THE_TEST", "secret")
    engine = EndpointEngine(*named)
    engine.start().result(WAIT_S)
    assert len(engine.generate([[1]], WARM).result(WAIT_S)) == 1
    server.behaviour = Behaviour(key="another")
    with pytest.raises(ConfigError, match="see the value of KEY_OF_THE_TEST") as refused:
        engine.generate([[1]], WARM).result(WAIT_S)
    assert "secret" not in f"{refused.value}{named}"
    engine.close()


def test_endpoint_takes_no_weights(engine: EndpointEngine) -> None:
    with pytest.raises(WeightsError, match="its weights cannot be updated"):
        engine.load(1, None)
    with pytest.raises(GeneratorError, match="to put to sleep"):
        engine.sleep()
