"""The environment under test, and what checks do with it."""

import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias

from openenv_core.apps import LoadedApp, load_app
from openenv_core.checker import drawing as action_source
from openenv_core.checker.outcomes import CheckError, CheckTimeoutError, NotApplicableError, within
from openenv_core.checker.subject_servers import RunningServer, Servers, manifest_in
from openenv_core.client import GenericEnvClient, SyncEnvClient
from openenv_core.errors import CapacityError, ConfigurationError, ExecutionError, ValidationFailedError
from openenv_core.manifest import Manifest, ManifestError, read_manifest
from openenv_core.targets import Target, TargetKind, target_of
from openenv_core.types import StepResult

if TYPE_CHECKING:
    import httpx


def imported(text: str, seconds: float) -> LoadedApp | CheckError | NotApplicableError:
    """Import an application; return what became of it where that cannot be done.

    Args:
        text: Stands for it.
        seconds: That the import may take.
    """
    try:
        return within(seconds, lambda: load_app(text), "openenv-import")
    except ConfigurationError as error:
        return NotApplicableError(str(error))
    except CheckTimeoutError:
        return CheckError(
            f"expected to import {text} within {seconds:g} s, got no end",
            change="do the work in the environment's constructor or reset, not while the module is imported",
        )
    except BaseException as error:  # anybody's code
        if isinstance(error, KeyboardInterrupt):
            raise
        return CheckError(
            f"expected to import {text}, got {type(error).__name__}: {error}",
            change="make the application importable: `ropewalk serve` with the same target shows the traceback",
        )


Client: TypeAlias = SyncEnvClient[dict[str, Any], dict[str, Any], dict[str, Any]]

REFUSED_AT_MOST: Final = 25
"""Actions in a row that may be refused, until nothing more is expected of drawing them."""


REFUSING: Final = "refuses valid actions"
"""The cause of every failure of an environment that takes nothing that its schema allows."""


@dataclass(slots=True)
class PlayedEpisode:
    """What came of playing: plain data, to be compared.

    Attributes:
        results: The reset's result and one a step, each {observation, reward, done, metadata}; a step that the
            environment refused is {"error": code}.
        actions: What was played, one a step.
        done: Whether the environment said that it was over.
    """

    results: list[dict[str, Any]] = field(default_factory=list)
    actions: list[dict[str, Any]] = field(default_factory=list)
    done: bool = False

    @property
    def rewards(self) -> list[Any]:
        """The rewards of the steps; the reset's is not among them."""
        return [result.get("reward") for result in self.results[1:]]


def play(
    client: Client, first: StepResult[dict[str, Any]], actions: Iterable[dict[str, Any]]
) -> PlayedEpisode:
    """Play an episode that was begun until it is done, or out of actions.

    Args:
        client: Plays it.
        first: The reset's result.
        actions: What to play.

    Raises:
        CheckError: The environment refuses one action after the other.
        ClientError: Whatever else the client met.
    """
    played = PlayedEpisode([plain(first)])
    refused = 0
    for action in actions:
        played.actions.append(action)
        try:
            result = client.step(action)
        except (ValidationFailedError, ExecutionError) as error:
            played.results.append({"error": error.code})
            refused += 1
            if refused >= REFUSED_AT_MOST:
                raise refusing(refused, action, error) from error
            continue
        refused = 0
        played.results.append(plain(result))
        if result.done:
            played.done = True
            break
    return played


def refusing(count: int, action: dict[str, Any], error: Exception) -> CheckError:
    """Return the failure of an environment that takes nothing that its schema allows."""
    return CheckError(
        f"expected actions that the schema allows to be taken, got {count} refusals in a row, "
        f"the last for {action}: {error}",
        change="narrow the action's schema to what the environment takes, or list "
        "validation.episodes.example_actions in openenv.yaml",
        cause=REFUSING,
    )


def plain(result: StepResult[dict[str, Any]]) -> dict[str, Any]:
    """Return a result as plain data."""
    return {
        "observation": result.observation,
        "reward": result.reward,
        "done": result.done,
        "metadata": result.metadata,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckLimits:
    """How much is tried.

    Attributes:
        sessions: Sessions at once under load.
        episodes: Episodes over which leaks are looked for.
        steps: Steps of one episode, where a check does not play to the end.
        fuzz: Fuzzed actions a check.
        seed: What every choice of the checker comes from.
        step_timeout_s: Seconds that a reply may take.
        start_timeout_s: Seconds until a server must be healthy.
    """

    sessions: int = 16
    episodes: int = 1000
    steps: int = 200
    fuzz: int = 100
    seed: int = 0
    step_timeout_s: float = 10.0
    start_timeout_s: float = 60.0


SLOT_WAIT_S: Final = 10.0
"""How long a server may take to give back the slot of a session that has ended."""


class Subject:
    """One environment under test. A context manager: its end stops everything that was started.

    Args:
        target: What is looked at.
        limits: How much is tried.
        token: Bearer token of the server, where a URL asks for one.

    Attributes:
        chosen: Names of the checks that the pytest suite runs; None: all.
    """

    chosen: frozenset[str] | None = None

    def __init__(
        self, target: Target, limits: CheckLimits | None = None, *, token: str | None = None
    ) -> None:
        self.target = target
        self.limits = limits or CheckLimits()
        self.token = token
        self._lock = threading.RLock()
        self._servers = Servers(target, self.limits.start_timeout_s)
        self._app: LoadedApp | CheckError | NotApplicableError | None = None
        self._clients: list[Client] = []
        self._pool: action_source.ActionPool | None = None
        self._found: dict[str, Any] = {}
        self.told: dict[str, str] = {}
        """Failures that were told already, and the check that did."""

    @classmethod
    def of(cls, target: "str | Path | Target", *, token: str | None = None, **limits: Any) -> Self:
        """Return the subject that a text or path stands for.

        Args:
            target: What `ropewalk validate` takes.
            token: Bearer token of the server, where a URL asks for one.
            limits: Fields of `CheckLimits`.

        Raises:
            ConfigurationError: It stands for nothing.
        """
        found = target if isinstance(target, Target) else target_of(str(target))
        return cls(found, CheckLimits(**limits), token=token)

    @property
    def kind(self) -> TargetKind:
        """What sort of thing it is."""
        return self.target.kind

    @property
    def folder(self) -> Path | None:
        """The environment's own folder; None for a URL and an image."""
        return self.target.folder

    def need_folder(self) -> Path:
        """Return the folder.

        Raises:
            NotApplicableError: There is none.
        """
        if self.folder is None:
            raise NotApplicableError(f"there is no folder to look into, for a target of kind {self.kind}")
        return self.folder

    @cached_property
    def manifest(self) -> Manifest:
        """The manifest of the folder, or of the folder in the image.

        Raises:
            CheckError: It is absent or wrong.
            NotApplicableError: There is no folder.
        """
        try:
            if self.kind is TargetKind.IMAGE:
                return manifest_in(self._servers.shared())
            return read_manifest(self.need_folder())
        except ManifestError as error:
            raise CheckError(
                str(error), change="write openenv.yaml as docs/validate.md has it, or as `ropewalk init` does"
            ) from error

    @property
    def promises(self) -> Manifest:
        """The manifest where there is a good one, else one of defaults: for checks that only want the promises."""
        try:
            return self.manifest
        except (CheckError, NotApplicableError):
            return Manifest(spec_version=1, name="unknown")

    @property
    def app(self) -> LoadedApp:
        """The application, imported into this process, after a process of its own has survived importing it.

        Raises:
            NotApplicableError: A URL or an image, or an application that cannot be looked into.
            CheckError: It cannot be imported.
        """
        if self.kind in (TargetKind.URL, TargetKind.IMAGE):
            raise NotApplicableError(f"there is no code to look into, for a target of kind {self.kind}")
        with self._lock:
            if self._app is None:
                assert self.url
                self._app = imported(self.target.text, self.limits.start_timeout_s)
            if isinstance(self._app, Exception):
                raise self._app
            return self._app

    @property
    def cap(self) -> int | None:
        """How many sessions the server takes at once; None where that cannot be known beforehand."""
        try:
            return self.app.served.cap
        except (CheckError, NotApplicableError):
            return None

    @property
    def url(self) -> str:
        """A running server, shared by all checks; started when first asked for, and again when it has died.

        Raises:
            CheckError: It does not start.
        """
        if self.kind is TargetKind.URL:
            return self.target.text.rstrip("/")
        return self._servers.shared().url

    @contextmanager
    def server(
        self,
        *,
        env_vars: Mapping[str, str] | None = None,
        docker_options: Mapping[str, Any] | None = None,
        **serve_options: Any,
    ) -> Iterator[RunningServer]:
        """Start a server of one's own, for as long as the block lasts.

        Args:
            env_vars: Environment variables of the server.
            docker_options: Fields of `ContainerOptions`, where the target is an image.
            serve_options: Options of `ropewalk serve` with underscores: `max_sessions=4` is `--max-sessions 4`.
                An image has its own command, so none of them apply to it.

        Raises:
            NotApplicableError: The target is a URL, whose server is not ours to start.
            CheckError: It does not start.
        """
        if self.kind is TargetKind.URL:
            raise NotApplicableError("a server at a URL is not the checker's to start, kill or measure")
        with self._servers.own(env_vars, docker_options, serve_options) as server:
            yield server

    def client(self, url: str | None = None, **options: Any) -> Client:
        """Return a client with dicts for models, unconnected; use it in `with`, or close it.

        Args:
            url: The server's; the shared one's by default.
            options: What `EnvClient` takes.
        """
        given: dict[str, Any] = {
            "message_timeout_s": self.limits.step_timeout_s,
            "mode": "simulation",
            "token": self.token,
            **options,
        }
        client = GenericEnvClient(url or self.url, **given).sync()
        with self._lock:
            self._clients = [known for known in self._clients if not known._closed]
            self._clients.append(client)
        return client

    @contextmanager
    def http(self, url: str | None = None, **headers: str) -> "Iterator[httpx.Client]":
        """Open a client for plain HTTP on a server, the shared one by default.

        Raises:
            CheckError: A request in the block is not answered.
        """
        import httpx

        from openenv_core.proxies import client_for

        if self.token is not None:
            headers["Authorization"] = f"Bearer {self.token}"
        where = url or self.url
        try:
            with client_for(where, headers) as client:
                client.base_url, client.timeout = httpx.URL(where), httpx.Timeout(self.limits.step_timeout_s)
                yield client
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise CheckError(
                f"expected a server at {where} that answers, got {type(error).__name__}: {error}",
                change="see what the server prints under `ropewalk serve`",
            ) from error

    @cached_property
    def schema(self) -> dict[str, Any]:
        """What GET /schema says: the JSON schemas of action, observation and state.

        Raises:
            CheckError: It says something else.
        """
        with self.http() as http:
            reply = http.get("/schema")
        try:
            found = reply.json()
        except ValueError:
            found = None
        wanted = ("action", "observation", "state")
        if reply.status_code != 200 or not isinstance(found, dict) or not all(n in found for n in wanted):
            raise CheckError(
                f"expected GET /schema to answer 200 with action, observation and state, got "
                f"{reply.status_code} {reply.text[:200]}",
                change="serve with create_app, and give it the models",
            )
        return found

    def actions(self, seed: int | random.Random | None = None) -> Iterator[dict[str, Any]]:
        """Yield valid actions for ever; the same ones for the same seed.

        The manifest's `example_actions` and the schema's `examples` where there are any; for an environment of
        tools, calls of its tools; else what the schema allows.

        Args:
            seed: Decides the choice; the limits' own by default.

        Raises:
            CheckError: None can be made.
        """
        with self._lock:
            if self._pool is None:
                self._pool = action_source.pool(
                    self.schema["action"],
                    self.promises.validation.episodes.example_actions,
                    self._tools,
                    self.limits.seed,
                )
        draw = seed if isinstance(seed, random.Random) else random.Random(f"{self.limits.seed}/{seed}")
        return self._pool.draw(draw)

    def episode(
        self,
        client: Client,
        *,
        seed: int | None = None,
        action_seed: int = 0,
        max_steps: int | None = None,
        actions: Iterator[dict[str, Any]] | None = None,
        **reset_options: Any,
    ) -> PlayedEpisode:
        """Play one episode until it is done, or for so many steps.

        Args:
            client: Plays it.
            seed: Of the reset.
            action_seed: Decides the actions.
            max_steps: The limits' `steps` by default.
            actions: What to play in place of drawn ones.
            reset_options: Further options of the reset.

        Raises:
            CheckError: The environment refuses one action after the other.
            ClientError: Whatever else the client met.
        """
        chosen = self.actions(action_seed) if actions is None else actions
        options = reset_options if seed is None else {"seed": seed, **reset_options}
        return play(client, self.reset(client, **options), islice(chosen, max_steps or self.limits.steps))

    @property
    def reset_options(self) -> dict[str, Any]:
        """What every reset is given, by the manifest."""
        return self.promises.validation.episodes.reset_options

    def once(self, name: str, find: Callable[[], Any]) -> Any:
        """Find something out, at most once: checks build on what others found."""
        if name not in self._found:
            self._found[name] = find()
        return self._found[name]

    def reset(
        self, client: Client, *, wait_s: float = SLOT_WAIT_S, **options: Any
    ) -> StepResult[dict[str, Any]]:
        """Reset, waiting a while for the slot of an earlier session that is about to be free.

        Args:
            client: The session.
            wait_s: Seconds to wait.
            options: Of the reset; those of the manifest go with them.

        Raises:
            CapacityError: None came free.
        """
        deadline = time.monotonic() + wait_s
        while True:
            try:
                return client.reset(**{**self.reset_options, **options})
            except CapacityError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def close(self) -> None:
        """Stop everything that was started. Idempotent."""
        clients, self._clients = self._clients, []
        self._servers.close()
        for client in clients:
            _attempt(client.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _tools(self) -> list[dict[str, Any]]:
        """Ask the environment which tools it has."""
        with self.client() as client:
            self.reset(client)
            return list(client.step({"type": "list_tools"}).observation.get("tools") or [])


def _attempt(work: Callable[[], object]) -> None:
    """Do something at the end whose failure changes nothing."""
    try:
        within(SLOT_WAIT_S, work)
    except Exception:
        return
