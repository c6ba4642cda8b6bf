"""An environment with all kinds of tools: slow ones, failing ones, ones that ask back."""

import asyncio
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from openenv_core import Observation, State
from openenv_core.tools import (
    AskingUnavailableError,
    Image,
    NoSuchResourceError,
    ToolAction,
    ToolContext,
    ToolEnvironment,
    ToolFailedError,
    ToolObservation,
    completion,
    prompt,
    resource,
    tool,
)
from servers import create_app
from servers.app import EnvironmentApp
from servers.settings import ServerSettings

FORM = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


class ToolBox(ToolEnvironment[State]):
    SUPPORTS_CONCURRENT_SESSIONS = True
    living: ClassVar[set["ToolBox"]] = set()
    """Instances in this process that were not closed."""
    cancelled: ClassVar[list[str]] = []

    def __init__(self) -> None:
        self.episode = 0
        self.count = 0
        self.notes: dict[str, str] = {"first": "hello"}
        self.living.add(self)

    def reset(self, seed: int | None = None) -> Observation:
        print("an environment prints what it likes")  # noqa: T201 - must not reach the wire
        self.episode += 1
        self.count = seed or 0
        return Observation()

    @property
    def state(self) -> State:
        return State(step_count=self.count)

    def close(self) -> None:
        self.living.discard(self)
        if closed_path := os.environ.get("TOOLBOX_CLOSED"):
            Path(closed_path).touch()

    @tool
    def bump(self, by: int = 1) -> int:
        """Add to the count of this session, and return it.

        Args:
            by: What to add.
        """
        self.count += by
        return self.count

    @tool
    def where(self) -> dict[str, int]:
        """Tell the episode, and the thread."""
        return {"episode": self.episode, "thread": threading.get_ident()}

    @tool
    def fail(self) -> str:
        """Fail."""
        raise ToolFailedError("it cannot be done")

    @tool
    def break_down(self) -> str:
        """Fail by mistake."""
        raise KeyError("missing")

    @tool
    def picture(self) -> list[str | Image]:
        """Return a picture."""
        return ["a dot", Image(b"\x89PNG")]

    @tool
    def long(self, size: int) -> str:
        """Return a long text."""
        return "x" * size

    @tool
    async def wait(self, context: ToolContext, seconds: float = 60.0, name: str = "") -> str:
        """Wait, and tell how far it is."""
        try:
            context.progress(1, 2, "half")
            context.log("info", {"waiting": seconds})
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self.cancelled.append(name)
            raise
        return "waited"

    @tool
    def work(self, context: ToolContext, seconds: float = 20.0, name: str = "") -> str:
        """Work in a thread, until the caller gives it up."""
        context.progress(1)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if context.cancelled:
                self.cancelled.append(name)
                return "given up"
            time.sleep(0.005)
        return "worked"

    @tool
    async def greet(self, context: ToolContext) -> str:
        """Ask for two names, one after the other, and greet."""
        first = await context.elicit("Who are you?", FORM, name="who")
        second = await context.elicit("And you?", FORM, name="who")
        return f"hello {first['content']['name']} and {second['content']['name']}"

    @tool
    async def think(self, context: ToolContext) -> str:
        """Ask the caller's language model, if there is one."""
        try:
            return str((await context.sample("2 + 2?", 10))["content"]["text"])
        except AskingUnavailableError:
            return "nobody thinks"

    @tool
    def note(self, title: str, text: str, context: ToolContext) -> None:
        """Write a note."""
        context.resource_updated(f"notes://{title}")
        if title not in self.notes:
            context.resources_changed()
            context.tools_changed()
        self.notes[title] = text

    @resource("notes://{title}")
    def a_note(self, title: str) -> str:
        """One note."""
        if title not in self.notes:
            raise NoSuchResourceError(f"there is no note {title}")
        return self.notes[title]

    @resource("notes:all", mime_type="application/json")
    def all_notes(self) -> dict[str, str]:
        """All notes."""
        return self.notes

    @prompt
    def sum_up(self, tone: str) -> str:
        """Ask for a summary."""
        return f"Sum up the notes, in a {tone} tone."

    @completion(prompt="sum_up", argument="tone")
    def tones(self, typed: str) -> list[str]:
        return [tone for tone in ("dry", "drunk", "sweet") if tone.startswith(typed)]


def toolbox_app(cap: int = 8, **settings: Any) -> EnvironmentApp:
    """Return an app of tool boxes with its own settings."""
    app = create_app(ToolBox, ToolAction, ToolObservation, env_name="toolbox", max_concurrent_envs=cap)
    return EnvironmentApp(app.served, replace(ServerSettings(), **settings))


app = create_app(ToolBox, ToolAction, ToolObservation, env_name="toolbox", max_concurrent_envs=64)
