"""Many callers of one prompt each become few calls of many prompts, and everyone gets their own answer."""

import asyncio
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import pytest

from rl_bridge.errors import GeneratorError, PromptRefusedError
from rl_bridge.generator.client import MAX_TOKENS_PER_CALL, GeneratorClient
from rl_bridge.services.handle import LocalService, Roster, ServiceHandle, StickySession
from rl_bridge.types import Completion, SamplingSettings

WARM = SamplingSettings(temperature=1.0, max_new_tokens=1)
GREEDY = SamplingSettings(temperature=0.0, max_new_tokens=1)


class FakeEngine:
    """Answers a prompt with itself, when told to."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[Sequence[int]], SamplingSettings]] = []
        self.seeds: list[Sequence[int] | None] = []
        self.refused: set[int] = set()
        self.open = asyncio.Event()
        self.open.set()
        self.failure: Exception | None = None
        self.under_way = self.most_under_way = 0
        self.ids: list[str] = []
        self.aborted: list[str] = []

    async def abort(self, ids: list[str]) -> None:
        self.aborted += ids

    async def generate_many(
        self,
        prompts: list[Sequence[int]],
        sampling: SamplingSettings,
        seeds: list[int] | None,
        ids: list[str],
    ) -> list[Completion]:
        self.ids += ids
        self.calls.append((prompts, sampling))
        self.seeds.append(seeds)
        failure = self.failure
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            await asyncio.sleep(0)
            await self.open.wait()
        finally:
            self.under_way -= 1
        if failure is not None:
            raise failure
        for place, (number,) in enumerate(prompts):
            if number in self.refused:
                raise PromptRefusedError(place, f"{number} is no number")
        return [
            Completion(
                tokens=list(prompt), logprobs=[0.0] * len(prompt), versions=[0] * len(prompt), stopped=True
            )
            for prompt in prompts
        ]

    @property
    def sizes(self) -> list[int]:
        return [len(prompts) for prompts, _ in self.calls]


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def ask(
    client: GeneratorClient, *numbers: int, sampling: SamplingSettings = WARM, seeded: bool = False
) -> list[asyncio.Task[Completion]]:
    return [
        asyncio.ensure_future(client.complete([number], sampling, 100 + number if seeded else None))
        for number in numbers
    ]


def answers(completions: Sequence[Completion]) -> list[int]:
    return [completion.tokens[0] for completion in completions]


async def test_prompts_gather_while_calls_are_under_way() -> None:
    engine = FakeEngine()
    client = GeneratorClient(LocalService(engine), max_batch=64, max_calls=2)
    engine.open.clear()
    tasks = ask(client, 0)
    await settle()
    tasks += ask(client, 1)
    await settle()
    for number in range(2, 30):
        tasks += ask(client, number)
        await settle()
    assert engine.sizes == [1, 1]
    engine.open.set()
    assert answers(await asyncio.gather(*tasks)) == list(range(30))
    assert engine.sizes == [1, 1, 28]
    assert engine.most_under_way == 2
    # A call carries no more than it may.
    client = GeneratorClient(LocalService(engine), max_batch=8, max_calls=2)
    assert answers(await asyncio.gather(*ask(client, *range(20)))) == list(range(20))
    assert engine.sizes[3:] == [8, 8, 4]
    assert engine.most_under_way == 2


async def test_settings_are_never_mixed_and_seeds_travel_with_their_prompts() -> None:
    engine = FakeEngine()
    client = GeneratorClient(LocalService(engine), max_batch=64)
    tasks = ask(client, 0, 1, 2) + ask(client, 3, 4, sampling=GREEDY) + ask(client, 5)
    assert answers(await asyncio.gather(*tasks)) == list(range(6))
    by_settings = {number: sampling for prompts, sampling in engine.calls for (number,) in prompts}
    assert by_settings == {0: WARM, 1: WARM, 2: WARM, 3: GREEDY, 4: GREEDY, 5: WARM}
    engine.calls.clear()
    engine.seeds.clear()
    tasks = ask(client, 0, 1, seeded=True) + ask(client, 2, 3) + ask(client, 4, seeded=True)
    assert answers(await asyncio.gather(*tasks)) == list(range(5))
    assert [[number for (number,) in prompts] for prompts, _ in engine.calls] == [[0, 1], [2, 3], [4]]
    assert engine.seeds == [[100, 101], None, [104]]


async def test_every_replica_gets_its_share() -> None:
    engine = FakeEngine()
    replicas = [Replica(number, engine) for number in range(3)]
    handle = ServiceHandle(policy_roster(1, *replicas))
    client = GeneratorClient(handle, max_batch=64, max_calls=2)
    engine.open.clear()
    tasks = ask(client, *range(48))
    await settle()
    assert engine.sizes == [16, 16, 16]
    tasks += ask(client, *range(48, 98))  # behind them: one more call each, as full as they come
    await settle()
    tasks += ask(client, *range(98, 100))
    await settle()
    assert engine.sizes == [16, 16, 16, 50, 2]
    handle.update(
        policy_roster(2, replicas[0])
    )  # their calls come back, but no more go out than one can take
    engine.open.set()
    assert answers(await asyncio.gather(*tasks)) == list(range(100))
    handle.update(policy_roster(3))
    tasks = ask(client, *range(5))  # a call goes out all the same, and waits for one
    await settle()
    handle.update(policy_roster(4, replicas[1]))
    assert answers(await asyncio.gather(*tasks)) == list(range(5))


async def test_long_answers_travel_in_smaller_calls_and_more_of_them() -> None:
    engine = FakeEngine()
    client = GeneratorClient(LocalService(engine), max_batch=8, max_calls=2)
    engine.open.clear()
    long = SamplingSettings(temperature=1.0, max_new_tokens=MAX_TOKENS_PER_CALL // 2)
    longer = SamplingSettings(temperature=1.0, max_new_tokens=MAX_TOKENS_PER_CALL * 2)
    tasks = ask(client, *range(9), sampling=long) + ask(client, *range(9, 30), sampling=longer)
    await settle()
    assert engine.sizes == [2, 2, 2, 2, 1] + [1] * 6  # as much room as for two calls of 8
    engine.open.set()
    assert answers(await asyncio.gather(*tasks)) == list(range(30))


async def test_refused_prompt_fails_its_own_caller_alone() -> None:
    engine = FakeEngine()
    engine.refused = {1, 4}
    client = GeneratorClient(LocalService(engine), max_batch=64)
    results = await asyncio.gather(*ask(client, *range(6), seeded=True), return_exceptions=True)
    for place in (1, 4):
        assert str(results[place]) == f"the engine refused a prompt: {place} is no number"
    assert [result.tokens[0] for result in results if isinstance(result, Completion)] == [0, 2, 3, 5]
    assert engine.seeds[-1] == [100, 102, 103, 105]
    # When all are refused nothing is left to send, and the client lives on.
    results = await asyncio.gather(*ask(client, 1, 4), return_exceptions=True)
    assert [type(result) for result in results] == [PromptRefusedError, PromptRefusedError]
    assert answers([await client.complete([6], WARM)]) == [6]


async def test_cancelled_caller_takes_nobody_along_and_is_not_sent() -> None:
    engine = FakeEngine()
    client = GeneratorClient(LocalService(engine), max_batch=2, max_calls=1)
    engine.open.clear()
    under_way = ask(client, 0, 1)
    await settle()
    waiting = ask(client, 2, 3, 4)
    await settle()
    under_way[0].cancel()
    waiting[0].cancel()
    await settle()
    engine.open.set()
    assert answers(await asyncio.gather(under_way[1], *waiting[1:])) == [1, 3, 4]
    assert [prompts for prompts, _ in engine.calls] == [[[0], [1]], [[3], [4]]]
    # When all who wait are cancelled nothing is sent, and the client lives on.
    engine.open.clear()
    under_way = ask(client, 5)
    await settle()
    waiting = ask(client, 6, 7)
    await settle()
    for task in waiting:
        task.cancel()
    engine.open.set()
    await asyncio.gather(*under_way)
    await settle()
    assert answers([await client.complete([8], WARM)]) == [8]
    assert engine.sizes == [2, 2, 1, 1]


async def test_prompts_that_nobody_waits_for_are_aborted_at_the_engine() -> None:
    engine = FakeEngine()
    engine.open.clear()
    client = GeneratorClient(LocalService(engine), max_batch=3, max_calls=1)
    shared = ask(client, 0, 1, 2)
    await settle()
    shared[0].cancel()
    shared[2].cancel()
    await settle()
    assert (engine.aborted, engine.under_way) == ([engine.ids[0], engine.ids[2]], 1)
    waiting = ask(client, 3)  # behind a call of which one caller is left
    await settle()
    assert engine.sizes == [3]
    shared[1].cancel()  # the last one frees the call's place at once
    await settle()
    assert engine.aborted[2:] == engine.ids[:3]
    assert engine.sizes == [3, 1]
    engine.open.set()
    assert answers(await asyncio.gather(*waiting)) == [3]
    # What was answered, or never sent, is not aborted.
    waiting = ask(client, 4)
    waiting[0].cancel()
    await settle()
    assert len(engine.aborted) == 5
    # A call that takes too long is, and so is one in flight when the client is closed.
    engine.open.clear()
    late = GeneratorClient(LocalService(engine), max_batch=3, timeout_s=0.01)
    with pytest.raises(GeneratorError, match="did not answer 1 prompts"):
        await late.complete([5], WARM)
    closing = ask(client, 6)
    await settle()
    await client.close()
    assert engine.aborted[5:] == engine.ids[-2:]
    with pytest.raises(GeneratorError, match="closed"):
        await closing[0]


async def test_abort_reaches_every_replica_and_waits_for_none_that_is_silent() -> None:
    """A prompt's call may have gone to another replica than its session's; load and failures are not counted."""

    class Silent(Replica):
        async def call(self, name: str, args: Any, kwargs: Any) -> Any:
            await asyncio.Event().wait()

    class Aborting(Replica):
        async def call(self, name: str, args: Any, kwargs: Any) -> Any:
            assert name == "abort"
            await self.engine.abort(*args)

    replicas = [Silent(0), Aborting(1), Aborting(2)]
    handle = ServiceHandle(policy_roster(1, *replicas))
    assert await handle.query_replicas("abort", ["a", "b"], timeout_s=0.01) == {1: None, 2: None}
    assert [replica.engine.aborted for replica in replicas] == [[], ["a", "b"], ["a", "b"]]


async def test_close_fails_whoever_waits_and_sends_nothing_more() -> None:
    engine = FakeEngine()
    client = GeneratorClient(LocalService(engine), max_batch=1, max_calls=2)
    engine.open.clear()
    tasks = ask(client, *range(6))
    await settle()
    assert engine.sizes == [1, 1]
    await client.close()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results] == [GeneratorError] * 6
    assert {str(result) for result in results} == {"the generator is closed"}
    assert engine.sizes == [1, 1]
    assert engine.under_way == 0


@pytest.mark.parametrize("steps", range(5))
async def test_close_reaches_a_caller_wherever_its_prompt_is(steps: int) -> None:
    engine = FakeEngine()
    engine.open.clear()
    client = GeneratorClient(LocalService(engine), max_batch=1)
    (task,) = ask(client, 0)
    for _ in range(steps):  # not asked yet, waiting, scheduled, sent
        await asyncio.sleep(0)
    await client.close()
    with pytest.raises(GeneratorError, match="the generator is closed"):
        await asyncio.wait_for(task, 60)


class Replica:
    """A replica whose engine is a `FakeEngine`."""

    def __init__(self, number: int, engine: FakeEngine | None = None) -> None:
        self.replica, self.incarnation = number, 1
        self.engine = engine or FakeEngine()

    async def call(self, name: str, args: Any, kwargs: Any) -> Any:
        return await self.engine.generate_many(*args)

    def first_rank(self) -> "Replica":
        return self

    @property
    def answered(self) -> list[int]:
        return sorted(number for prompts, _ in self.engine.calls for (number,) in prompts)


def policy_roster(epoch: int, *replicas: Replica) -> Roster:
    names = frozenset({"generate_many"})
    return Roster("policy", epoch, names, names, 60.0, replicas)


async def test_turns_go_to_the_replica_of_their_conversation_and_siblings_to_that_of_their_group() -> None:
    replicas = [Replica(number) for number in range(2)]
    handle = ServiceHandle(policy_roster(1, *replicas))
    client = GeneratorClient(handle, max_batch=2, max_calls=1)

    def pin(near: StickySession | None = None) -> closing[StickySession]:
        return closing(handle.session(near=near, max_sessions=9))

    async def conversation(begin: int, group: StickySession, turns: int = 4) -> None:
        with pin(group) as session:
            for turn in range(turns):
                (number,) = (await client.complete([begin + turn], WARM, session=session)).tokens
                assert number == begin + turn

    with pin() as first, pin() as second:
        groups = [(100, first), (200, first), (300, first), (500, second), (600, second), (700, second)]
        await asyncio.gather(*(conversation(begin, group) for begin, group in groups))
        parts = [{number // 500 for number in replica.answered} for replica in replicas]
        assert sorted(parts, key=str) == [{0}, {1}]
        assert [len(replica.answered) for replica in replicas] == [12, 12]
        # One that is full holds up nobody but those who have to go there.
        busy = replicas[0] if 100 in replicas[0].answered else replicas[1]
        busy.engine.open.clear()
        waiting = [asyncio.ensure_future(conversation(begin, first, 1)) for begin in range(3)]
        await conversation(800, second)
        assert busy.engine.sizes[-1] == 2  # and the third prompt waits
        busy.engine.open.set()
        await asyncio.gather(*waiting)
    # Without a session the least loaded answers, as ever.
    assert (await client.complete([5], WARM)).tokens == [5]
    await client.close()
