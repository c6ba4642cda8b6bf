"""A gateway by itself in a process: python gateway_process.py TRACES. Its policy says hello, or hangs if asked to."""

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gateway_fixtures import ScriptedPolicy
from tool_fixtures import PieceTokenizer

from rl_bridge.gateway.app import GatewayServer
from rl_bridge.gateway.episode import CallSettings
from rl_bridge.gateway.service import GatewayService
from rl_bridge.rollout.policy import ChatPolicy
from rl_bridge.tokens.chat import ChatTokenizer


class HangingPolicy(ScriptedPolicy):
    async def complete(self, prompt: Any, *arguments: Any, **options: Any) -> Any:
        if "hang" in self.pieces.decode(prompt, skip_special_tokens=False):
            print("hangs", flush=True)  # noqa: T201 - for the test that waits
            await asyncio.sleep(3600)
        return await super().complete(prompt, *arguments, **options)


async def main() -> None:
    pieces = PieceTokenizer()
    auto = SimpleNamespace(from_pretrained=lambda path, **options: pieces)
    sys.modules["transformers"] = SimpleNamespace(AutoTokenizer=auto)  # type: ignore[assignment]
    policy = HangingPolicy(pieces, lambda prompt: "hello")
    chat = ChatPolicy(ChatTokenizer("pieces"), policy, max_new_tokens=100, max_length=1000)
    service = GatewayService(chat, CallSettings(), Path(sys.argv[1]))
    server = GatewayServer(service.gateway)
    await server.start()
    print(server.url, service.key, flush=True)  # noqa: T201 - likewise
    await asyncio.get_running_loop().create_future()


asyncio.run(main())
