"""Runs one program as an agent's, in the sandbox or not: python run_alone.py CONFINED FOLDER COMMAND..."""

import asyncio
import sys
from pathlib import Path

from rl_bridge.agents.process import run_program
from rl_bridge.agents.programs import AgentProgram
from rl_bridge.agents.sandbox import AgentSandbox


async def main() -> None:
    confined, folder, *command = sys.argv[1:]
    sandbox = (
        AgentSandbox(command[0], (), ("127.0.0.1", 9), memory_bytes=256 << 20, processes=64)
        if confined == "True"
        else None
    )
    await run_program(AgentProgram(command=command), Path(folder), sandbox)


if __name__ == "__main__":
    asyncio.run(main())
