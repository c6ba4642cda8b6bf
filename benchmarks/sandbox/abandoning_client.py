"""Opens and uses sessions, then waits to be killed: `python -m benchmarks.sandbox.abandoning_client PORT COUNT`."""

import asyncio
import sys
from typing import Final

from benchmarks.sandbox.served import READY
from envs.code_interpreter_env import CodeInterpreterEnv
from openenv_core.errors import OpenEnvError

USE: Final = """
import threading, time
threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
kept = list(range(10_000))
with open("kept.txt", "w") as file:
    file.write("kept" * 1000)
"""
FOREVER: Final = "while True: pass"
AT_ONCE: Final = 8
ATTEMPTS: Final = 600
PAUSE_S: Final = 0.05


async def use(port: int, number: int, slots: asyncio.Semaphore) -> "asyncio.Task[object] | None":
    """Open a session and use it; every twentieth is abandoned during an execution."""
    async with slots:
        env = CodeInterpreterEnv(base_url=f"http://127.0.0.1:{port}")
        for attempt in range(ATTEMPTS):
            try:
                await env.connect()
                await env.reset()
                break
            except OpenEnvError:  # some slots of the previous wave are not released yet
                if attempt + 1 == ATTEMPTS:
                    raise
                await env.close()
                env = CodeInterpreterEnv(base_url=f"http://127.0.0.1:{port}")
                await asyncio.sleep(PAUSE_S)
        result = await env.execute(USE)
        assert result.observation.status == "ok", result
        return asyncio.create_task(env.execute(FOREVER)) if number % 20 == 7 else None


async def main() -> None:
    """Open the sessions, print READY, and wait to be killed."""
    port, count = map(int, sys.argv[1:])
    slots = asyncio.Semaphore(AT_ONCE)
    clients = await asyncio.gather(*(use(port, number, slots) for number in range(count)))
    await asyncio.sleep(0.05)
    print(READY, flush=True)
    await asyncio.Event().wait()
    del clients


if __name__ == "__main__":
    asyncio.run(main())
