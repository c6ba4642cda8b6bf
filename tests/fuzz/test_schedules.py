"""Many concurrent callers that act at random: nothing leaks, and no caller reaches the session of another.

FUZZ_EXAMPLES says how many there are.
"""

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, ClassVar

import httpx
import pytest
from counter import Add, Count, Counter, CountState
from fuzzing import EXAMPLES, dice
from serving import eventually, reconfigured, request, serving, socket_to
from websockets.exceptions import WebSocketException

from servers import create_app

pytestmark = pytest.mark.slow

TOKENS = ("the-token-of-alice", "the-token-of-berta")
IDS = ("a", "b", "c", "new")
CALLERS = 8
MOVES = 4 * EXAMPLES
STEP_TIMEOUT_S = 0.1

ANSWERS = {200, 404, 429, 503, 504}
CODES = {"CAPACITY_REACHED", "SESSION_ERROR", "EXECUTION_ERROR"}


class Marked(Counter):
    """Names in every observation who reset it, and counts its instances."""

    BLOCKING = True
    made: ClassVar[int] = 0
    closed: ClassVar[int] = 0
    stepping: bool = False
    mark: str = ""

    def __init__(self) -> None:
        super().__init__()
        time.sleep(random.random() * 0.003)
        type(self).made += 1

    def reset(self, *, mark: str = "", **options: Any) -> Count:  # type: ignore[override]
        self.mark = mark
        return Count(extra=mark)

    def step(self, action: Add) -> Count:
        assert not self.stepping, "two calls at once"
        self.stepping = True
        time.sleep(2.5 * STEP_TIMEOUT_S if action.amount == 7 else random.random() * 0.005)
        self.stepping = False
        return Count(extra=self.mark)

    def close(self) -> None:
        time.sleep(random.random() * 0.003)
        assert not self.stepping, "closed in the middle of a step"
        type(self).closed += 1


class MarkedAsync(Marked):
    async def step(self, action: Add) -> Count:
        assert not self.stepping, "two calls at once"
        self.stepping = True
        try:
            await asyncio.sleep(2.5 * STEP_TIMEOUT_S if action.amount == 7 else random.random() * 0.005)
        finally:
            self.stepping = False
        return Count(extra=self.mark)


class MarkedInline(Marked):
    BLOCKING = False

    def step(self, action: Add) -> Count:
        return Count(extra=self.mark)


class Caller:
    """A client with a token that acts at random."""

    def __init__(self, number: int, address: str, rng: random.Random) -> None:
        self.token = TOKENS[number % len(TOKENS)]
        self._address = address
        self._rng = rng
        self._headers = {"authorization": f"Bearer {self.token}"}
        self._http = httpx.AsyncClient(
            base_url=f"http://{address}", headers=self._headers, trust_env=False, timeout=20
        )

    async def run(self) -> None:
        moves: list[Callable[[], Awaitable[Any]]] = [
            *2 * [lambda: self._ask("POST", "/reset", {"mark": self.token})],
            lambda: self._ask("POST", "/step", {"action": {"amount": self._amount()}}),
            lambda: self._ask("GET", "/state", None),
            lambda: self._rpc("openenv/session/close", {"session_id": self._rng.choice(IDS)}),
            lambda: self._talk(""),
            self._attach,
        ]
        async with self._http:
            for _ in range(MOVES):
                move = self._rng.choice(moves)
                if self._rng.random() < 0.25:
                    with suppress(TimeoutError):
                        await asyncio.wait_for(move(), self._rng.random() * 0.02)
                else:
                    await move()

    async def _attach(self) -> None:
        if self._rng.random() < 0.3:
            reply = await self._rpc("openenv/session/create", {})
            session_id = reply.get("result", {}).get("session_id", "nobody")
        else:
            session_id = self._rng.choice(IDS)
        await self._talk(f"?session_id={session_id}")

    def _amount(self) -> int:
        return 7 if self._rng.random() < 0.03 else 1

    async def _ask(self, method: str, path: str, body: Any) -> None:
        session_id = self._rng.choice((*IDS, None))
        headers = {} if session_id is None else {"X-OpenEnv-Session": session_id}
        reply = await self._http.request(method, path, json=body, headers=headers)
        assert reply.status_code in ANSWERS, reply.text
        if reply.status_code == 200 and path != "/state":
            assert reply.json()["observation"]["extra"] in (self.token, ""), "somebody else's session"

    async def _rpc(self, method: str, params: Any) -> Any:
        call = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        reply = await self._http.post("/mcp", json=call)
        assert reply.status_code == 200
        answer = reply.json()
        if "error" in answer:
            assert answer["error"]["code"] in (-32602, -32000), answer
        return answer

    async def _talk(self, query: str) -> None:
        frames: list[Any] = [
            {"type": "reset", "data": {"mark": self.token}},
            {"type": "step", "data": {"amount": self._amount()}},
            {"type": "state"},
            {"type": "mcp", "data": {"jsonrpc": "2.0", "id": 1, "method": "openenv/session/create"}},
            {"type": "close"},
        ]
        with suppress(WebSocketException, OSError):
            async with socket_to(self._address, query, additional_headers=self._headers) as ws:
                for _ in range(self._rng.randrange(4)):
                    await ws.send(json.dumps(self._rng.choice(frames)))
                    if self._rng.random() < 0.2:
                        ws.transport.abort()
                        return
                    self._judge(json.loads(await asyncio.wait_for(ws.recv(), 60)))

    def _judge(self, reply: Any) -> None:
        if reply["type"] == "error":
            assert reply["data"]["code"] in CODES, reply
            assert "two calls at once" not in reply["data"]["message"]
        elif reply["type"] == "observation":
            assert reply["data"]["observation"]["extra"] in (self.token, ""), "somebody else's session"


@pytest.mark.parametrize("kind", [Marked, MarkedAsync, pytest.param(MarkedInline, marks=pytest.mark.soak)])
async def test_random_client_schedules_leave_nothing_behind(
    kind: type[Marked], caplog: pytest.LogCaptureFixture
) -> None:
    env = type(kind.__name__, (kind,), {"made": 0, "closed": 0})
    app = reconfigured(
        create_app(env, Add, Count, max_concurrent_envs=4, state_cls=CountState),
        tokens=TOKENS,
        max_sessions_per_token=3,
        step_timeout_s=STEP_TIMEOUT_S,
        idle_timeout_s=0.1,
    )
    async with serving(app) as address:
        callers = [Caller(number, address, dice(number)) for number in range(CALLERS)]
        async with asyncio.timeout(60):
            await asyncio.gather(*(caller.run() for caller in callers))
        await eventually(lambda: app.sessions.active == 0)
        await eventually(lambda: not app.sessions.standing)
        await eventually(lambda: env.made == env.closed)
        assert env.made > 0
        reply = await request(address, "GET", "/health", headers={"authorization": f"Bearer {TOKENS[0]}"})
        assert reply.json() == {"status": "healthy"}
    faults = [record.getMessage() for record in caplog.records if record.exc_info]
    assert not faults, "\n".join(faults[:5])
