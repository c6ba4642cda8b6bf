"""`rollout.agent.*`: an agent that plays the episodes, with the policy as its model."""

from typing import Literal, Self

from pydantic import Field, model_validator

from rl_bridge.config.sections import Count, Seconds, Section


class AgentConfig(Section):
    """`rollout.agent.*`: who plays. Set exactly one of `preset`, `function` and `command`."""

    preset: Literal["claude-code", "codex", "opencode", "mini-swe-agent"] | None = None
    """A program that is known: `rl_bridge.agents.programs` has its command, flags, variables and files."""
    function: str | None = None
    """An asynchronous function that takes an `rl_bridge.agents.AgentRun`, as `package.module:name`; it runs in the
    worker's process, on its event loop."""
    command: tuple[str, ...] | None = None
    """A program's command and arguments, in which `{task}`, `{url}`, `{key}`, `{mcp_url}`, `{model}` and `{folder}`
    stand for those of the episode."""
    program: str | None = None
    """The path of the preset's program, if it is not in PATH under its name."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the program, beside the preset's; values may have the same names in braces."""
    files: dict[str, str] = Field(default_factory=dict)
    """Files to write before the program starts, by their paths in the episode's folder, beside the preset's; the same
    names stand for the episode's, as within a string of JSON."""
    sandbox: bool | None = None
    """Whether a program is confined (Linux): it sees the system's programs, what it is installed with, an empty folder
    in memory, and of all networks the gateway alone, which has the policy and the environment's tools. By default it is
    where this machine permits it, and a warning says where it does not; true refuses such a machine."""
    memory_mb: Count = 4096
    """The memory of a confined program with all that it starts, and of its folder, in MiB. Beyond it a process is
    killed."""
    processes: Count = 1024
    """How many processes and threads a confined program may have."""
    readable: tuple[str, ...] = ()
    """Further files and folders that a confined program may read, such as a compiler below a home."""
    in_environment: bool = False
    """Whether the command runs in the environment's machine, as that of a Harbor task: by the environment's own tools,
    `write_file`, `run` and, when it has ended, `submit`. It starts in the task's working folder."""
    gateway_host: str = "127.0.0.1"
    """The address that the gateway listens at: for a program in a container one that the container reaches, such as
    that of Docker's bridge."""
    timeout_s: Seconds = 600.0
    """How long after the reset the agent may take; then the episode is truncated."""
    untrained: tuple[str, ...] = ()
    """Regular expressions; a call whose system message one of them is found in is answered, and not trained."""
    train_without_tools: bool = True
    """Whether calls that offer no tools, such as those for titles and summaries, are trained."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if sum(who is not None for who in (self.preset, self.function, self.command)) != 1:
            raise ValueError(
                "expected rollout.agent to have one of preset (a known program), command (another program) and "
                "function (of Python)"
            )
        if self.function is not None and self.sandbox:
            raise ValueError(
                "expected rollout.agent.sandbox with a preset or a command; a function runs in the worker's process"
            )
        if self.in_environment and (self.command is None or self.sandbox):
            raise ValueError(
                "expected rollout.agent.in_environment with a command, which that machine has, and without sandbox"
            )
        if self.program is not None and self.preset is None:
            raise ValueError(
                "expected rollout.agent.program with rollout.agent.preset; use rollout.agent.command"
            )
        return self
