"""Plays episodes over a client, with actions from a terminal, a pipe or a list."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from openenv_core.cli.command import sanitize
from openenv_core.client import SyncEnvClient
from openenv_core.errors import (
    ConfigurationError,
    ConnectionLostError,
    RequestTimeoutError,
    ServerError,
    SessionError,
)
from openenv_core.play.form import Json
from openenv_core.play.prompts import COMMANDS, CommandTypedError, Prompts, arguments_of, describe_form
from openenv_core.play.terminal import Terminal, as_json, format_number, observation_lines
from openenv_core.types import StepResult


@dataclass
class Game:
    """Plays episodes, one after another."""

    _client: SyncEnvClient[Json, Json, Json]
    terminal: Terminal
    episodes: int = 0
    _steps: int = 0
    _total: float | None = 0.0  # None if the episode cannot be scored
    _running: bool = False
    _done: bool = True
    _waits: bool = False

    @property
    def over(self) -> bool:
        """Whether a step needs a reset first."""
        return self._done

    def reset(self, options: Mapping[str, Any]) -> None:
        """Begin an episode; a running one is abandoned."""
        self.end_episode()
        self._waits = "table" in options
        self._say_waiting()
        result = self._client.reset(**options)
        self.episodes += 1
        self._steps, self._total = 0, 0.0
        self._running, self._done = True, False
        title = "".join(f", {name} {as_json(value)}" for name, value in options.items())
        self._report(
            "reset",
            result,
            [f"--- episode {self.episodes}{title}"],
            [],
            episode=self.episodes,
            options=dict(options),
        )
        self._count(result)

    def step(self, action: Json) -> None:
        """Take a step."""
        self._say_waiting()
        result = self._client.step(action)
        self._steps += 1
        if result.unscored is not None:
            self._total = None
        elif self._total is not None:
            self._total += float(result.reward or 0)
        line = f"step {self._steps}   reward {format_number(result.reward)}   return {format_number(self._total)}"
        end = [line + ("   done" if result.done else "")]
        self._report("step", result, [], end, step=self._steps, action=action, **{"return": self._total})
        self._count(result)

    def state(self) -> Json:
        """Return the state."""
        return self._client.state()

    def tools(self) -> list[Json]:
        """Return the tools of an environment of tools; the request does not count as a step of the episode."""
        tools = self._client.step({"type": "list_tools"}).observation.get("tools")
        return [tool for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []

    def end_session(self) -> None:
        """End the episode because its session is gone."""
        self.end_episode()
        self._done = True

    def end_episode(self) -> None:
        """Report the end of the running episode, if any."""
        if self._running:
            self._running = False
            steps = f"{self._steps} step" + ("" if self._steps == 1 else "s")
            outcome = "is over" if self._done else "was left"
            line = f"episode {self.episodes} {outcome} after {steps}: return {format_number(self._total)}"
            numbers = {"episode": self.episodes, "steps": self._steps, "return": self._total}
            self.terminal.report("episode", [line], **numbers, done=self._done)

    def _report(
        self, event: str, result: StepResult[Json], title: list[str], end: list[str], **fields: Any
    ) -> None:
        metadata = result.metadata or result.observation.get("metadata")
        extra = [f"  metadata: {sanitize(as_json(metadata))}"] if metadata else []
        lines = observation_lines(result.observation, colours=self.terminal.colours)
        fields |= {name: getattr(result, name) for name in ("observation", "reward", "done", "metadata")}
        self.terminal.report(event, [*title, *lines, *extra, *end], **fields)

    def _say_waiting(self) -> None:
        if self._waits:  # at a table, where it may be the turn of another player
            self.terminal.say("waiting for the other players ...")

    def _count(self, result: StepResult[Json]) -> None:
        self._done = result.done
        if self._done:
            self.end_episode()


RECOVERABLE_ERRORS: Final = (ServerError, RequestTimeoutError, ConnectionLostError)
"""Errors after which a game continues."""

EXIT_WAIT_S: Final = 2.0
"""Seconds to wait for a server's exit after a lost connection, while a person waits."""


@dataclass
class Loop:
    """The loop of a game: asks for actions, takes steps and reports them until the input ends.

    Args:
        game: The game to play.
        prompts: Asks for actions.
        options: The options of every reset; the seed of the first only.
        is_server_alive: Returns whether the server still runs, after waiting up to the given seconds for its exit.
        explain: Shows details of an error.
    """

    game: Game
    prompts: Prompts
    options: Json
    is_server_alive: Callable[[float], bool]
    explain: Callable[[Exception], None]
    failed: int = 0

    @property
    def _next_options(self) -> Json:
        return {name: value for name, value in self.options.items() if name != "seed"}

    def run(self) -> int:
        """Play to the end of the input; return the exit status."""
        self._attempt(self._reset, self.options)
        while True:
            try:
                if self.game.over:
                    self._prompt_reset()
                else:
                    self._attempt(self.game.step, self.prompts.action())
            except CommandTypedError as command:
                if command.name == ":quit":
                    break
                self._attempt(self._run_command, command)
            except EOFError:
                self.game.terminal.say()
                break
        self.game.end_episode()
        # Without a person to correct them, refused answers are failures.
        return 1 if (self.failed or self.prompts.refused) and not self.game.terminal.is_interactive else 0

    def _prompt_reset(self) -> None:
        text = self.prompts.line("Enter for another episode, q to leave: ")
        if text.lower() in ("q", "quit"):  # no action is asked for here that could be called so
            raise CommandTypedError(":quit", "")
        if text:
            self.prompts.refuse(f"expected Enter, :reset or q after the end of an episode, got {text!r}")
        else:
            self._attempt(self._reset, self._next_options)

    def _attempt(self, work: Callable[[Any], None], argument: Any) -> None:
        try:
            work(argument)
        except RECOVERABLE_ERRORS as error:
            # A connection breaks before the exit of the server's process is known.
            if not self.is_server_alive(EXIT_WAIT_S if isinstance(error, ConnectionLostError) else 0.0):
                raise
            self.failed += 1
            self.explain(error)
            name, message = type(error).__name__, str(error)
            self.game.terminal.report("error", [f"{name}: {sanitize(message)}"], type=name, message=message)
            if isinstance(error, ConnectionLostError | SessionError):
                self.game.end_session()

    def _run_command(self, command: CommandTypedError) -> None:
        match command.name:
            case ":reset":
                self._reset_with(command.rest)
            case ":state":
                state = self.game.state()
                text = sanitize(json.dumps(state, ensure_ascii=False, indent=2))
                self.game.terminal.report("state", [text], state=state)
            case ":tools":
                self._fetch_tools()
                self._show_tools()
            case _:
                self._show_help()

    def _reset_with(self, rest: str) -> None:
        try:
            options = json.loads(rest) if rest else {}
        except ValueError:
            options = None
        if isinstance(options, int) and not isinstance(options, bool):
            options = {"seed": options}
        if not isinstance(options, dict):
            self.prompts.refuse(f"expected :reset with a seed or a JSON object of options, got {rest!r}")
            return
        self._reset({**self._next_options, **options})

    def _reset(self, options: Json) -> None:
        self.game.reset(options)
        if not self.game.over and any(form.calls_tools for form in self.prompts.forms):
            previous = self.prompts.tools
            self._fetch_tools()  # a reset may choose them
            if self.prompts.tools != previous:
                self._show_tools()

    def _fetch_tools(self) -> None:
        self.prompts.tools = self.game.tools()

    def _show_tools(self) -> None:
        lines = []
        for tool in self.prompts.tools:
            about = str(tool.get("description") or "").strip().splitlines()
            title = f"{tool.get('name')}" + (f" - {about[0]}" if about else "")
            lines += describe_form(arguments_of(tool), title)
        self.game.terminal.report("tools", lines or ["no tools"], tools=list(self.prompts.tools))

    def _show_help(self) -> None:
        lines = [
            "Answer the prompts, or give a whole action as JSON: {...}. Beginnings of a choice are enough;",
            "Enter takes what stands in brackets. Text in double quotes is read as JSON.",
            *(f"  {name:<20}{text}" for name, text in COMMANDS.items()),
        ]
        self.game.terminal.report("help", lines, help=dict(COMMANDS))


def play_actions(game: Game, actions: Iterable[Json], options: Json) -> None:
    """Play a list of actions in one episode; ConfigurationError if the episode ends before the list."""
    game.reset(options)
    for index, action in enumerate(actions, 1):
        if game.over:
            raise ConfigurationError(
                f"expected the episode to last for every --action, got its end before number {index}; "
                "leave the rest out, or choose another --seed"
            )
        game.step(action)


def play_at_random(game: Game, actions: Iterable[Json], options: Json) -> None:
    """Play all of the actions, in as many episodes as needed; each episode's seed is one higher than the last."""
    for action in actions:
        if game.over:
            seed = options.get("seed")
            game.reset({**options, **({"seed": seed + game.episodes} if isinstance(seed, int) else {})})
            if game.over:  # the episode ended with its reset
                continue
        game.step(action)
