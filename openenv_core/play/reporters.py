"""Who is told of a game: a person, or a program that reads JSON, one event a line."""

import json
from typing import Any

from openenv_core.play.form import Json
from openenv_core.play.game import Result, Summary
from openenv_core.play.show import harmless, number, observation_lines
from openenv_core.play.terminal import Terminal


class ForPeople:
    """Tells in lines that are read."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal

    def began(self, episode: int, options: Json, result: Result) -> None:
        """Tell of a reset."""
        given = ", ".join(
            f"{name} {json.dumps(value, ensure_ascii=False)}" for name, value in options.items()
        )
        self._terminal.say(self._terminal.strong(f"--- episode {episode}" + (f", {given}" if given else "")))
        self._observation(result)

    def stepped(self, step: int, action: Json, result: Result, total: float) -> None:
        """Tell of a step."""
        self._observation(result)
        figures = f"step {step}   reward {number(result.reward)}   return {number(total)}"
        self._terminal.say(self._terminal.faint(figures + ("   done" if result.done else "")))

    def ended(self, summary: Summary) -> None:
        """Tell what an episode came to."""
        steps = f"{summary.steps} step" + ("" if summary.steps == 1 else "s")
        became = "is over" if summary.done else "was left"
        total = number(summary.total)
        self._terminal.say(
            self._terminal.strong(f"episode {summary.episode} {became} after {steps}: return {total}")
        )

    def failed(self, error: Exception) -> None:
        """Tell what went wrong."""
        self._terminal.say(f"{type(error).__name__}: {harmless(str(error))}")

    def told(self, name: str, value: Any) -> None:
        """Tell what was asked for."""
        self._terminal.say(harmless(json.dumps(value, ensure_ascii=False, indent=2)))

    def _observation(self, result: Result) -> None:
        for line in observation_lines(result.observation, colours=self._terminal.colours):
            self._terminal.say(line)
        if metadata := result.metadata or result.observation.get("metadata"):
            text = harmless(json.dumps(metadata, ensure_ascii=False))
            self._terminal.say(self._terminal.faint(f"  metadata: {text}"))


class ForPrograms:
    """Tells in JSON: one object a line, each with its `event`."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal

    def began(self, episode: int, options: Json, result: Result) -> None:
        """Tell of a reset."""
        self._event("reset", episode=episode, options=options, **_plain(result))

    def stepped(self, step: int, action: Json, result: Result, total: float) -> None:
        """Tell of a step."""
        self._event("step", step=step, action=action, **_plain(result), **{"return": total})

    def ended(self, summary: Summary) -> None:
        """Tell what an episode came to."""
        figures = {"episode": summary.episode, "steps": summary.steps, "return": summary.total}
        self._event("episode", **figures, done=summary.done)

    def failed(self, error: Exception) -> None:
        """Tell what went wrong."""
        self._event("error", type=type(error).__name__, message=str(error))

    def told(self, name: str, value: Any) -> None:
        """Tell what was asked for."""
        self._event(name, **{name: value})

    def _event(self, event: str, **fields: Any) -> None:
        self._terminal.emit(json.dumps({"event": event, **fields}))


def _plain(result: Result) -> Json:
    return {
        "observation": result.observation,
        "reward": result.reward,
        "done": result.done,
        "metadata": result.metadata,
    }
