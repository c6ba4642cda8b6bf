"""Knowing the id of another owner's session gives no access, on any route, at any worker."""

import asyncio
import json
from typing import Any

import pytest
from serve_process import serve
from serving import ask, request, rpc, socket_to

SESSION = "X-OpenEnv-Session"
ALICE = {"authorization": "Bearer the-token-of-alice"}
BERTA = {"authorization": "Bearer the-token-of-berta"}


@pytest.mark.parametrize("workers", ["1", pytest.param("2", marks=pytest.mark.slow)])
async def test_guessed_session_id_gives_no_access(workers: str) -> None:
    tokens = [word for of in (ALICE, BERTA) for word in ("--token", of["authorization"].split()[1])]
    with serve("--workers", workers, *tokens, "--max-sessions", "32") as server:
        for _ in range(4 if workers == "2" else 1):  # so that both workers hold one
            await guess(server.address)
        for process in server.family[1:]:
            told = " ".join((*process.cmdline(), *process.environ().values()))
            assert not any(token in told for token in tokens[1::2])


async def guess(address: str) -> None:
    reply = await request(address, "POST", "/reset", {"seed": 3}, {**ALICE, SESSION: "new"})
    session = reply.headers[SESSION]
    for guessed in (session, "nobody-has-this"):  # the answers are the same
        message = f"Unknown session_id: {guessed}"
        for naming in ({SESSION: guessed}, {"cookie": f"openenv_session={guessed}"}):
            for method, path, body in (("POST", "/step", {"action": {"amount": 1}}), ("GET", "/state", None)):
                refused = await request(address, method, path, body, BERTA | naming)
                detail = {"message": message, "code": "SESSION_ERROR"}
                assert (refused.status_code, refused.json()["detail"]) == (404, detail)
        call: dict[str, Any] = {"jsonrpc": "2.0", "id": 1, "params": {"session_id": guessed, "name": "x"}}
        for method in ("openenv/session/close", "tools/list", "tools/call"):
            answer = await rpc(address, method, call["params"], **BERTA)
            assert answer["error"] == {"code": -32602, "message": message, "data": None}
        close = call | {"method": "openenv/session/close"}
        async with socket_to(address, additional_headers=BERTA) as ws:
            assert (await ask(ws, {"type": "mcp", "data": close}))["data"]["error"]["code"] == -32602
        async with socket_to(address, path="/mcp", additional_headers=BERTA) as ws:
            assert (await ask(ws, close))["error"]["code"] == -32602
        async with socket_to(address, f"?session_id={guessed}", additional_headers=BERTA) as ws:
            frame = json.loads(await asyncio.wait_for(ws.recv(), 60))
            assert frame["data"] == {"message": message, "code": "SESSION_ERROR"}
    # The same id opened by another caller is another session.
    reply = await request(address, "POST", "/reset", {}, {**BERTA, SESSION: session})
    assert reply.json()["observation"]["total"] == 0
    # All of that has left the first one as it was.
    reply = await request(address, "GET", "/state", headers={**ALICE, SESSION: session})
    assert (reply.json()["total"], reply.json()["step_count"]) == (3, 0)
    async with socket_to(address, f"?session_id={session}", additional_headers=ALICE) as ws:
        assert (await ask(ws, {"type": "state"}))["data"]["total"] == 3
