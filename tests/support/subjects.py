"""Subjects of checks that are served in the test's own process, and helpers to run checks on them."""

import asyncio
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any
from uuid import uuid4

from pydantic import ConfigDict, Field
from serving import serving

from openenv_core import Action, Environment, EpisodeOverError, Observation, State
from openenv_core.checker.check import Check, checks
from openenv_core.checker.results import CheckReport, Result, run_check
from openenv_core.checker.subject import CheckLimits, Subject
from openenv_core.targets import Target, TargetKind
from servers import create_app

END = 6

MANIFEST = """\
spec_version: 1
name: walk
validation:
  reward: {range: [0, 1]}
  episodes: {max_steps: 20}
"""

DOCKERFILE = """\
ARG BASE_IMAGE=ropewalk-base:latest
FROM ${BASE_IMAGE}
USER root
COPY . /app/env
RUN pip install /app/env
USER env
EXPOSE 8000
HEALTHCHECK CMD ["healthcheck"]
CMD ["ropewalk", "serve", "/app/env", "--host", "0.0.0.0", "--port", "8000"]
"""

README = "# Walk\n\nStep forward until the end of the path.\n\nA step that reaches it is rewarded with 1.\n"


class Go(Action):
    by: int = Field(ge=1, le=3)


class Loose(Go):
    model_config = ConfigDict(extra="ignore")


class Seen(Observation):
    place: int = 0
    about: Any = None


class WalkState(State):
    place: int = 0


class Walk(Environment[Go, Seen, WalkState]):
    """A path with an end."""

    BLOCKING = False
    DETERMINISTIC = True
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        self._state = WalkState()

    def reset(self, *, seed: int | None = None, episode_id: str | None = None) -> Seen:
        self._state = WalkState(episode_id=episode_id or str(uuid4()), place=(seed or 0) % 3)
        return Seen(place=self._state.place)

    def step(self, action: Go) -> Seen:
        state = self._state
        if state.place >= END:
            raise EpisodeOverError
        state.place += action.by
        state.step_count += 1
        done = state.place >= END
        return Seen(place=state.place, reward=float(done), done=done)

    @property
    def state(self) -> WalkState:
        return self._state.model_copy()


def walk(env: Any = Walk, action: Any = Go, observation: Any = Seen, state: Any = WalkState) -> Any:
    return create_app(env, action, observation, env_name="walk", max_concurrent_envs=8, state_cls=state)


class Here(Subject):
    """A subject whose application is an object of this process, served from a thread on first use."""

    def __init__(self, app: Any, folder: Path | None = None, **limits: Any) -> None:
        super().__init__(Target(TargetKind.MODULE, "here:app", folder), CheckLimits(**limits))
        self._here = app
        self._address: Future[str] = Future()
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event

    @property
    def app(self) -> Any:
        return self._here.served

    @property
    def url(self) -> str:
        return self._url

    @contextmanager
    def server_or_url(self, **serve_options: Any) -> Iterator[tuple[str, None]]:
        """Yield the URL of the only server there is."""
        yield self.url, None

    @cached_property
    def _url(self) -> str:
        self._thread = threading.Thread(target=asyncio.run, args=(self._serve(),))
        self._thread.start()
        return f"http://{self._address.result(60)}"

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        async with serving(self._here) as address:
            self._address.set_result(address)
            await self._stop.wait()

    def close(self) -> None:
        super().close()
        if "_url" in vars(self):
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(60)


def run(subject: Subject, wanted: Iterable[Check]) -> CheckReport:
    """Run checks in this process."""
    return CheckReport(subject.target.text, tuple(run_check(subject, one) for one in wanted))


def result_of(check: str, subject: Subject) -> Result:
    (matching,) = [one for one in checks() if one.name == check]
    return run_check(subject, matching)


def look(check: str, app: Any, folder: Path | None = None, **limits: Any) -> Result:
    """Run one check on an application of this process."""
    with Here(app, folder, **limits) as subject:
        return result_of(check, subject)


def folder_with(place: Path, **files: str | None) -> Path:
    """Write the folder of a good environment without its code; `files` replaces files by name (see NAMES)."""
    contents: dict[str, str | None] = {
        "openenv.yaml": MANIFEST,
        "README.md": README,
        "server/Dockerfile": DOCKERFILE,
        "server/app.py": "",
    }
    for name, text in files.items():
        contents[NAMES.get(name, name)] = text
    for name, text in contents.items():
        if text is not None:
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_text(text)
    return place


NAMES = {"manifest": "openenv.yaml", "readme": "README.md", "dockerfile": "server/Dockerfile"}


def of_folder(check: str, folder: Path) -> Result:
    """Run one check that only inspects a folder."""
    with Subject(Target(TargetKind.PATH, str(folder), folder)) as subject:
        return result_of(check, subject)
