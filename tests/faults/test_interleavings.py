"""Whoever gives up when, and whatever breaks: a reply answers its own request, a slot is held for a lease at most."""

import asyncio
from contextlib import suppress
from typing import TypeAlias

import pytest
from counter import Add, Count, Counter
from counter_client import CounterEnv
from faulty_proxy import faulty_proxy
from fuzzing import EXAMPLES, LONG
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from serving import eventually, serving

from openenv_core import ConnectionLostError, EpisodeLostError, RequestTimeoutError
from servers import create_app

LEASE_S = 1.0
FOREVER_S = 20.0
GIVEN_UP = (RequestTimeoutError, ConnectionLostError, EpisodeLostError)  # a busy machine may miss a lease

Asking: TypeAlias = list[tuple[float, int, str | None]]
"""Of one task, its steps: how long it waits, how many milliseconds the environment takes, what breaks before."""

ASKING = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.002, 0.005, FOREVER_S]),
        st.integers(0, 4),
        st.sampled_from([None, None, None, "cut", "half_close"]),
    ),
    min_size=1,
    max_size=10,
)


class Echo(Counter):
    """Says what it is told, after as many milliseconds as the last digit says."""

    DETERMINISTIC = False

    async def step(self, action: Add) -> Count:  # type: ignore[override]
        await asyncio.sleep(action.amount % 10 / 1000)
        return Count(total=action.amount)


async def play(tasks: list[Asking], timeout_s: float, end: str) -> None:
    app = create_app(Echo, Add, Count, max_concurrent_envs=3)
    async with (
        serving(app) as address,
        faulty_proxy(address) as proxy,
        CounterEnv(proxy.url, lease_s=LEASE_S) as client,
    ):
        vector = await client.vector(2)
        client._timeout_s = timeout_s

        async def step(task: int, amount: int) -> int:
            if task < 2:  # these share one session, the others have one each
                return (await client.step(Add(amount=amount))).observation.total
            (told,) = await vector.ask("step", members=[task - 2], actions=[{"amount": amount}])
            if "rows" not in told.fields:
                raise TimeoutError  # its own former request is under way
            return int(told.fields["rows"][0]["total"])

        async def ask(task: int, asking: Asking) -> None:
            for number, (patience_s, takes, fault) in enumerate(asking, 1):
                if fault is not None:
                    getattr(proxy, fault)()
                amount = 1000 * (task + 1) + 20 * number + takes
                with suppress(TimeoutError, *GIVEN_UP):
                    async with asyncio.timeout(patience_s):
                        assert await step(task, amount) == amount

        asked = [asyncio.create_task(ask(*one)) for one in enumerate(tasks)]
        if end == "answered":
            await asyncio.gather(*asked)
            with suppress(*GIVEN_UP):
                assert await step(0, 7) == 7
        else:  # as Ctrl-C does, at any moment
            await asyncio.wait(asked[:1])
            for one in asked:
                one.cancel()
            for outcome in await asyncio.gather(*asked, return_exceptions=True):
                assert outcome is None or isinstance(outcome, asyncio.CancelledError)
        await vector.close()
        if end != "vanish":
            await client.close()

        def is_gone() -> bool:
            if end == "vanish":  # also over a connection that the proxy was making just now
                proxy.cut()
            return not (app.sessions.active or app._built().links._links)

        proxy.cut_after = lambda: (0, 0)
        await eventually(is_gone)


@pytest.mark.slow
@settings(
    max_examples=3 * EXAMPLES,
    derandomize=not LONG,
    deadline=None,
    suppress_health_check=[*HealthCheck],
    phases=[Phase.generate],  # no two runs of an example are the same
)
@given(
    tasks=st.lists(ASKING, min_size=4, max_size=4),
    timeout_s=st.sampled_from([0.003, FOREVER_S]),
    end=st.sampled_from(["answered", "interrupted", "vanish"]),
)
def test_a_reply_answers_its_own_request_and_a_slot_outlives_no_lease(
    tasks: list[Asking], timeout_s: float, end: str
) -> None:
    asyncio.run(play(tasks, timeout_s, end))
