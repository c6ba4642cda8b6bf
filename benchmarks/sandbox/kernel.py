"""Measures a Jupyter kernel with its own client.

    python kernel.py STARTS EXECUTIONS

Prints one JSON object. Imports nothing of this package, so that any installation with ipykernel and jupyter_client can
run it by its path.
"""

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

CODE = "1 + 1"
WARM_UP = 10


async def run(client: Any) -> None:
    """Execute once, and wait for the reply."""
    reply = await client.execute_interactive(CODE, allow_stdin=False, output_hook=lambda _: None, timeout=60)
    assert reply["content"]["status"] == "ok", reply


async def measure(starts: int, executions: int) -> dict[str, Any]:
    """Start kernels one after another, and execute in the last."""
    from jupyter_client.manager import start_new_async_kernel  # type: ignore[import-not-found]

    started: list[float] = []
    durations: list[float] = []
    memory = 0.0
    for turn in range(starts):
        start_time = time.perf_counter()
        manager, client = await start_new_async_kernel(kernel_name="python3", startup_timeout=60)
        started.append((time.perf_counter() - start_time) * 1e3)
        if turn == starts - 1:
            for _ in range(WARM_UP + executions):
                start_time = time.perf_counter()
                await run(client)
                durations.append((time.perf_counter() - start_time) * 1e3)
            memory = _memory_mb(manager.provisioner.process.pid)
        client.stop_channels()
        await manager.shutdown_kernel(now=True)
    return {"start_ms": started, "ms": durations[WARM_UP:], "mb": memory}


def _memory_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return float(line.split()[1]) / 1024
    return 0.0


if __name__ == "__main__":
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    print(json.dumps(asyncio.run(measure(*map(int, sys.argv[1:])))))
