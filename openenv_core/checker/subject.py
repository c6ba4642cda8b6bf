"""The environment under test: its manifest, application, servers and clients, as used by checks."""

import asyncio
import io
import random
import tarfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt

from openenv_core.adapters.episode import fetch_schema
from openenv_core.checker import drawing
from openenv_core.checker.check import CheckError, NotApplicableError
from openenv_core.client import GenericEnvClient, SyncEnvClient
from openenv_core.errors import (
    ConfigurationError,
    ConnectionFailedError,
    OpenEnvError,
    ProtocolError,
    ProviderError,
)
from openenv_core.manifest import MANIFEST, Manifest, ManifestError, load_keys, parse_manifest
from openenv_core.providers import LocalDockerProvider, LocalProcessProvider
from openenv_core.targets import (
    AppDescription,
    Target,
    TargetKind,
    declared_by,
    exposed_port,
    find_module,
    is_environment_folder,
    load_app,
    provider_of,
    target_of,
)
from openenv_core.types import StepResult

Client: TypeAlias = SyncEnvClient[dict[str, Any], dict[str, Any], dict[str, Any]]

SLOT_WAIT_S: Final = 10.0
"""Seconds for a server to release the slot of a session that has ended."""

_MANIFEST_IN_IMAGE: Final = f"/app/env/{MANIFEST}"
"""The manifest's path in images, of ours and of the released package."""


class CheckLimits(BaseModel):
    """Limits of the checks; the descriptions are the help of `ropewalk validate`."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    sessions: PositiveInt = Field(16, description="concurrent sessions under load")
    episodes: PositiveInt = Field(1000, description="episodes over which leaks are measured")
    steps: PositiveInt = Field(200, description="steps of one episode, unless a check plays to the end")
    fuzz: PositiveInt = Field(100, description="fuzzed actions per check")
    seed: int = Field(0, description="seed of the checker's choices")
    step_timeout_s: PositiveFloat = Field(10, description="timeout of a reply")
    start_timeout_s: PositiveFloat = Field(60, description="timeout of a server's start")


SubjectServer: TypeAlias = LocalProcessProvider | LocalDockerProvider
"""The provider of a server of the subject."""


def container_of(server: SubjectServer) -> Any:
    """Return the container that a provider's server runs in; None if it runs as local processes."""
    return getattr(server, "container", None)


class FrameClient(GenericEnvClient):
    """A client that can also send raw frames, such as a reset without the seed and episode_id that `reset` adds.

    Attributes:
        reset_options: Options of every reset, from the manifest.
    """

    reset_options: Mapping[str, Any] = {}

    async def reset(self, **options: Any) -> StepResult[dict[str, Any]]:
        """Start an episode; see `EnvClient.reset`."""
        return await super().reset(**{**self.reset_options, **options})

    async def send_frame(self, text: bytes) -> dict[str, Any]:
        """Send a frame and return the data of the observation in reply."""
        return await self._session.request(text, "observation")


class Subject:
    """The environment under test. As a context manager it stops everything that it has started.

    Attributes:
        left_out: Names of the checks that an author's tests leave out.
        reported: Causes of failures reported so far, with the check that reported each.
    """

    left_out: frozenset[str] = frozenset()

    def __init__(
        self, target: Target, limits: CheckLimits | None = None, *, token: str | None = None
    ) -> None:
        self.target = target
        self.limits = limits or CheckLimits()
        self.token = token
        self._lock = threading.RLock()
        self._servers: list[SubjectServer] = []
        self._shared: SubjectServer | None = None
        self._start_failure: CheckError | None = None
        self._closed = False
        self.reported: dict[str, str] = {}

    @classmethod
    def of(cls, target: "str | Path | Target", *, token: str | None = None, **limits: Any) -> Self:
        """Return the subject for a target, given as text or path."""
        resolved = target if isinstance(target, Target) else target_of(str(target))
        return cls(resolved, CheckLimits(**limits), token=token)

    def require(self) -> None:
        """Raise unless the target exists; the checks find out whether it works.

        Raises:
            ConfigurationError: The environment does not exist, or nothing replies at the URL.
            ProviderError: The image does not exist, or there is no engine to run it.
        """
        text = self.target.text
        if self.kind is TargetKind.URL:
            try:
                self.schema  # noqa: B018 - is kept
            except ConnectionFailedError as error:
                raise ConfigurationError(f"{error}; start it first") from None
        elif self.kind is TargetKind.IMAGE:
            exposed_port(text)  # raises
        elif self.kind is TargetKind.PATH and Path(text).is_dir() and not is_environment_folder(Path(text)):
            raise ConfigurationError(
                f"expected an environment in the folder {text}, got neither {MANIFEST} nor server/app.py there; "
                "name the folder that holds them"
            )
        elif self.kind is TargetKind.MODULE and find_module(text.partition(":")[0]) is None:
            load_app(text)  # raises, and says what is missing

    @property
    def kind(self) -> TargetKind:
        """The kind of the target."""
        return self.target.kind

    def require_folder(self) -> Path:
        """Return the environment's folder.

        Raises:
            NotApplicableError: The target has none.
        """
        if self.target.folder is None:
            raise NotApplicableError(f"a target of kind {self.kind} has no folder")
        return self.target.folder

    @cached_property
    def manifest(self) -> Manifest:
        """The manifest in the folder or in the image, or what a file declares.

        Raises:
            CheckError: It is missing or invalid.
            NotApplicableError: The target has no folder, or the image no manifest.
        """
        try:
            if self.kind is TargetKind.IMAGE:
                return self._manifest_in_image()
            if self.target.file is None:
                self.require_folder()
            return declared_by(self.target)
        except ManifestError as error:
            raise CheckError(
                str(error),
                change="write openenv.yaml, or the table tool.ropewalk of a file, as docs/validate.md shows",
            ) from error

    @property
    def manifest_or_defaults(self) -> Manifest:
        """The manifest if it is valid, else one with defaults; for checks that only read declarations."""
        try:
            return self.manifest
        except (CheckError, NotApplicableError):
            return Manifest(spec_version=1, name="unknown")

    @cached_property
    def app(self) -> AppDescription:
        """The application's description. It is imported here only after a server process has imported it successfully.

        Raises:
            NotApplicableError: The target is a URL or an image, or the application cannot be inspected.
            CheckError: The server does not start.
        """
        if self.kind in (TargetKind.URL, TargetKind.IMAGE):
            raise NotApplicableError(f"a target of kind {self.kind} has no code to import")
        assert self.url
        try:
            return load_app(self.target.text)
        except ConfigurationError as error:
            raise NotApplicableError(str(error)) from error

    @property
    def cap(self) -> int | None:
        """The server's maximum number of sessions; None if it is not known in advance."""
        try:
            return self.app.cap
        except (CheckError, NotApplicableError):
            return None

    @property
    def url(self) -> str:
        """The URL of the server shared by all checks; started on first use, and again if it has died.

        Raises:
            CheckError: The server does not start.
        """
        if self.kind is TargetKind.URL:
            return self.target.text.rstrip("/")
        return str(self._shared_server().url)

    def _shared_server(self) -> SubjectServer:
        with self._lock:
            if self._start_failure is not None:
                raise self._start_failure
            if self._shared is None or not self._shared.alive:
                try:
                    self._shared = self._start_server()
                except CheckError as failure:
                    if self._shared is None:  # every check would fail likewise, each after the same wait
                        self._start_failure = failure
                    raise
            return self._shared

    def _start_server(self, env_vars: Mapping[str, str] | None = None) -> SubjectServer:
        if self._closed:
            raise NotApplicableError("the checker is shutting down")
        server: SubjectServer = provider_of(
            self.target, env_vars=env_vars, start_timeout_s=self.limits.start_timeout_s
        )
        self._servers.append(server)
        try:
            server.start()
        except ProviderError as error:
            raise CheckError(
                f"expected a server that starts, got: {error}",
                change="make the application importable and its server healthy; run `ropewalk serve` with the same "
                "target to see its output",
            ) from error
        return server

    @contextmanager
    def server(self, env_vars: Mapping[str, str] | None = None) -> Iterator[SubjectServer]:
        """Start a separate server for the block, and yield its provider.

        Args:
            env_vars: Environment variables of the server.

        Raises:
            NotApplicableError: The target is a URL, whose server cannot be started from here.
            CheckError: The server does not start.
        """
        if self.kind is TargetKind.URL:
            raise NotApplicableError("the checker cannot start, kill or measure a server at a URL")
        server = self._start_server(env_vars)
        try:
            yield server
        finally:
            server.stop()

    @contextmanager
    def server_or_url(self) -> Iterator[tuple[str, SubjectServer | None]]:
        """Start a separate server and yield its URL and provider; if the target is a URL, yield that and None."""
        if self.kind is TargetKind.URL:
            yield self.url, None
            return
        with self.server() as server:
            yield str(server.url), server

    def client(self, url: str | None = None, **options: Any) -> Client:
        """Return an unconnected client with dicts for models, for a `with`."""
        client_options: dict[str, Any] = {
            "message_timeout_s": self.limits.step_timeout_s,
            "mode": "simulation",
            "token": self.token,
            "queue_timeout_s": SLOT_WAIT_S,
            **options,
        }
        frame_client = FrameClient(url or self.url, **client_options)
        frame_client.reset_options = self.reset_options
        return frame_client.sync()

    @cached_property
    def schema(self) -> dict[str, Any]:
        """The reply of GET /schema of the shared server; see `fetch_schema`."""
        return self.fetch_schema(self.url)

    def fetch_schema(self, url: str) -> dict[str, Any]:
        """Return the reply of a server to GET /schema: the JSON schemas of action, observation and state.

        Raises:
            CheckError: The reply does not contain these.
            ConnectionFailedError: There is no reply.
        """
        try:
            return asyncio.run(fetch_schema(url, token=self.token, timeout_s=self.limits.step_timeout_s))
        except ProtocolError as error:
            raise CheckError(
                f"expected GET /schema to answer with action, observation and state, got: {error}",
                change="serve with create_app, and give it the models",
            ) from error

    def actions(self, seed: int | random.Random | None = None) -> Iterator[dict[str, Any]]:
        """Yield valid actions without end; the same ones for the same seed.

        They are the manifest's `example_actions` and the schema's `examples`, if any; otherwise calls of the
        environment's tools if its actions are tool calls, or values of the schema.
        """
        draw = seed if isinstance(seed, random.Random) else random.Random(f"{self.limits.seed}/{seed}")
        return self._pool.draw(draw)

    @cached_property
    def _pool(self) -> drawing.ActionPool:
        examples = self.manifest_or_defaults.validation.episodes.example_actions
        return drawing.pool(self.schema["action"], examples, self._tools, self.limits.seed)

    @property
    def reset_options(self) -> dict[str, Any]:
        """Options for every reset, from the manifest."""
        return self.manifest_or_defaults.validation.episodes.reset_options

    def close(self) -> None:
        """Stop everything that was started. Idempotent."""
        self._closed = True
        for server in list(self._servers):
            server.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _manifest_in_image(self) -> Manifest:
        from openenv_core.providers.docker.engine import DockerEngine

        container = container_of(self._shared_server())
        if container is None:
            raise NotApplicableError("there is no container to inspect")
        try:
            archive_bytes = DockerEngine.find().archive(container.id, _MANIFEST_IN_IMAGE)
            with tarfile.open(fileobj=io.BytesIO(archive_bytes)) as archive:
                member = next((entry for entry in archive if entry.isfile()), None)
                file = None if member is None else archive.extractfile(member)
                text = "" if file is None else file.read().decode("utf-8", "replace")
        except (OpenEnvError, tarfile.TarError) as error:
            raise NotApplicableError(f"the image has no {_MANIFEST_IN_IMAGE}: {error}") from error
        return parse_manifest(load_keys(text, _MANIFEST_IN_IMAGE))

    def _tools(self) -> list[dict[str, Any]]:
        with self.client() as client:
            client.reset()
            return list(client.step({"type": "list_tools"}).observation.get("tools") or [])
