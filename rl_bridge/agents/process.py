"""Runs an agent's program in a folder of its own, and ends it with everything that it has started."""

import asyncio
import contextlib
import os
import shlex
import shutil
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from openenv_core.guard import guard_command
from openenv_core.signals import signal_name
from rl_bridge.agents.confine import FOLDER as CONFINED_FOLDER
from rl_bridge.agents.confine import write_files
from rl_bridge.agents.programs import AgentProgram
from rl_bridge.agents.run import AgentRun
from rl_bridge.agents.sandbox import AgentSandbox
from rl_bridge.errors import ConfigError

GRACE_S: Final = 1.0
"""How long a program may take to end after SIGTERM."""
OUTPUT_FILE: Final = "output.log"
FOLDER_THERE: Final = "/tmp/agent"
"""Where a program that runs in the environment's machine finds its files."""
TAIL_BYTES: Final = 2000
"""How much of a program's output is shown where it failed."""


@dataclass(frozen=True, slots=True)
class ProgramExit:
    """How a program ended: its exit code, negative for the signal that killed it, and the end of its output."""

    code: int
    output: str

    def describe(self) -> str:
        """Return it in words."""
        how = f"by {signal_name(-self.code)}" if self.code < 0 else f"with the exit code {self.code}"
        return f"the agent ended {how}; its output ends with:\n{self.output}"


def require_program(program: AgentProgram) -> None:
    """Raise ConfigError if a program is not installed."""
    if shutil.which(program.command[0]) is None:
        how = f"; {program.install}" if program.install else ""
        raise ConfigError(
            f"expected the agent's program {program.command[0]!r} in PATH, found none{how}, or name its path in "
            "rollout.agent.command"
        )


async def run_program(
    program: AgentProgram, folder: Path, sandbox: AgentSandbox | None = None
) -> ProgramExit:
    """Run a program, whose values are filled in, to its end; if cancelled, it and its descendants are killed.

    Args:
        program: The program.
        folder: Where its output is kept; without a sandbox also its own folder.
        sandbox: Confines it; None runs it as a plain process.
    """
    output_path = folder / OUTPUT_FILE
    async with contextlib.AsyncExitStack() as stack:
        output = stack.enter_context(output_path.open("wb"))
        if sandbox is None:
            write_files(folder, program.files)
            command, link, home = program.command, -1, str(folder)
        else:
            command, link = await stack.enter_async_context(sandbox.open(program.command, program.files))
            home = CONFINED_FOLDER
        process = await asyncio.create_subprocess_exec(
            *guard_command(command, grace_s=GRACE_S, everything=True, inherited_fd=link),
            stdin=asyncio.subprocess.PIPE,
            stdout=output,
            stderr=output,
            cwd=folder,
            env=_make_environment(program.env, home),
            pass_fds=() if link < 0 else (link,),
        )
        try:
            code = await process.wait()
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGTERM)
                await process.wait()
    # As shells do: 128 more than the signal. Codes beyond all signals are a program's own, such as 255 for -1.
    killed = 128 < code < 128 + signal.NSIG
    return ProgramExit(128 - code if killed else code, read_tail(output_path))


async def run_there(program: AgentProgram, run: AgentRun, timeout_s: float) -> ProgramExit:
    """Run a program in the environment's machine, by the tools of its episode, and submit what it has done there.

    Args:
        program: The program, whose values are filled in.
        run: The episode.
        timeout_s: After which it is ended; the environment may end it, and the episode, earlier.
    """
    for name, text in program.files.items():
        await run.tools.call("write_file", {"path": f"{FOLDER_THERE}/{name}", "content": text})
    variables = [f"{name}={value}" for name, value in program.env.items()]
    command = shlex.join(["env", *variables, *program.command])
    output, failed = await run.tools.call("run", {"command": command, "timeout_s": timeout_s})
    (run.folder / OUTPUT_FILE).write_text(output, encoding="utf-8")
    await run.tools.call("submit", {})
    return ProgramExit(int(failed), output[-TAIL_BYTES:])


def read_tail(path: Path) -> str:
    """Return the end of a file as text."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        return file.read().decode(errors="replace").strip()


def _make_environment(variables: Mapping[str, str], home: str) -> dict[str, str]:
    """Return a program's variables: nothing of this process's own that could be a secret."""
    passed = {name: os.environ[name] for name in ("PATH", "LANG", "LC_ALL") if name in os.environ}
    return {**passed, "HOME": home, "TMPDIR": home, **variables}
