"""The released provider of Daytona sandboxes, implemented with the package `daytona`."""

import json
import os
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final
from uuid import uuid4

from openenv_core.compat.containers import ContainerProvider
from openenv_core.errors import ConfigurationError, ServerStartError
from openenv_core.manifest import MANIFEST, ManifestError, load_keys
from openenv_core.providers.base import REMOTE_POLL_FACTOR, wait_healthy
from openenv_core.providers.remote import healthy

PORT: Final = 8000
"""The port that servers listen on in a sandbox."""
URL_LIFETIME_S: Final = 86_400
"""Lifetime of a signed URL, the longest that Daytona allows."""
EXEC_TIMEOUT_S: Final = 10
HEALTH_TIMEOUT_S: Final = 5.0
AUTO_STOP_MIN: Final = 15
"""Daytona's own default."""

_CONTINUATION: Final = re.compile(r"\\[ \t]*\n(?:[ \t]*(?:#.*)?\n)*")
_MOUNTS: Final = re.compile(r"(?im)^(\s*RUN\s+)(?:--mount=\S+[ \t]*(?:\\\n(?:[ \t]*(?=--mount=))?)?)+")


def _arguments_of(keyword: str, dockerfile: str) -> list[str]:
    """Return the arguments of each instruction of a kind, with continued lines joined."""
    return re.findall(rf"(?im)^[ \t]*{keyword}[ \t]+(\S.*?)[ \t]*$", _CONTINUATION.sub(" ", dockerfile))


@dataclass(kw_only=True, eq=False, repr=False)
class DaytonaProvider(ContainerProvider):
    """Starts an environment's image in a Daytona sandbox, and the server in it.

    Args:
        api_key: The account's API key; `DAYTONA_API_KEY` by default.
        public: Whether the server's URL needs no signature.
        resources: `daytona.Resources` of sandboxes built from an image; ignored for snapshots.
        auto_stop_interval: Minutes without use until the sandbox stops; 0 for never.
        target: Daytona's region.
        on_snapshot_create_logs: Called with each line of the image's build log.
        cmd: The shell command that starts the server; by default, the app named in `openenv.yaml` is served, or else
            the Dockerfile's CMD runs.
        create_timeout: Seconds for the creation of a sandbox.
    """

    _dockerfile_registry: ClassVar[dict[str, dict[str, Any]]] = {}

    api_key: str | None = None
    public: bool = False
    resources: Any = None
    auto_stop_interval: int = AUTO_STOP_MIN
    target: str | None = None
    on_snapshot_create_logs: Callable[[str], None] | None = None
    cmd: str | None = None
    create_timeout: float = 300

    def __post_init__(self) -> None:
        sdk = _sdk()
        account = {"api_key": self.api_key or os.environ.get("DAYTONA_API_KEY"), "target": self.target}
        self._daytona = sdk.Daytona(
            sdk.DaytonaConfig(**{key: value for key, value in account.items() if value})
        )
        self._sandbox: Any = None
        self._preview_url: str | None = None

    @classmethod
    def image_from_dockerfile(cls, dockerfile_path: str, context_dir: str | None = None) -> str:
        """Register a Dockerfile; return the value that `start_container` takes as its image.

        Args:
            dockerfile_path: Path of the Dockerfile.
            context_dir: The folder that it copies from; by default the parent of its own folder.

        Raises:
            FileNotFoundError: The Dockerfile does not exist.
            ConfigurationError: The context lacks a file that the Dockerfile copies.
        """
        path = Path(dockerfile_path).resolve()
        text = path.read_text(encoding="utf-8")
        context = path.parent.parent if context_dir is None else Path(context_dir)
        if not context.is_dir():
            raise ConfigurationError(f"expected a folder as context_dir, got {context_dir!r}")
        for arguments in _arguments_of("COPY", text):
            copied = arguments.split()[0]
            if copied.startswith(("/", "--from=")) or (context / copied).exists():
                continue
            if not any(context.glob(copied)):
                raise ConfigurationError(
                    f"the COPY source {copied!r} was not found in {context}; name the folder that the Dockerfile "
                    "copies from as context_dir"
                )
        cls._dockerfile_registry[str(path)] = {
            "stripped_content": cls.strip_buildkit_syntax(text),
            "context_dir": str(context),
            "server_cmd": cls._parse_dockerfile_cmd(text),
        }
        return f"dockerfile:{path}"

    @staticmethod
    def strip_buildkit_syntax(dockerfile_content: str) -> str:
        """Return a Dockerfile without the mounts of its RUN instructions, which Daytona's builder does not support."""
        return _MOUNTS.sub(r"\1", dockerfile_content)

    @staticmethod
    def _parse_dockerfile_cmd(dockerfile_content: str) -> str | None:
        commands = _arguments_of("CMD", dockerfile_content)
        if not commands:
            return None
        try:
            return shlex.join(json.loads(commands[-1]))
        except (ValueError, TypeError):  # in shell form
            return commands[-1]

    @staticmethod
    def _parse_app_field(yaml_content: str) -> str | None:
        try:
            app = load_keys(yaml_content, MANIFEST).get("app")
        except ManifestError:
            return None
        return app.strip() or None if isinstance(app, str) else None

    def start_container(
        self, image: str, port: int | None = None, env_vars: Mapping[str, str] | None = None, **kwargs: Any
    ) -> str:
        """Create a sandbox, start the server in it and return its URL.

        Args:
            image: An image's name, `snapshot:NAME`, or the value that `image_from_dockerfile` returned.
            port: None or 8000, the port that Daytona forwards.
            env_vars: Environment variables.
            kwargs: `cmd`, the shell command that starts the server; others are passed to `Daytona.create`.

        Raises:
            ConfigurationError: The port is another, nothing names the app to serve, or a sandbox is already running.
        """
        if self._sandbox is not None:
            raise ConfigurationError(
                "the provider has started a sandbox already; call stop_container() first"
            )
        if port not in (None, PORT):
            raise ConfigurationError(f"Daytona's provider only supports port {PORT}, got {port}")
        cmd, built = kwargs.pop("cmd", None) or self.cmd, None
        options: dict[str, Any] = {"public": True} if self.public else {}
        if self.auto_stop_interval != AUTO_STOP_MIN:
            options["auto_stop_interval"] = self.auto_stop_interval
        if env_vars:
            options["env_vars"] = dict(env_vars)
        kind, _, name = image.partition(":")
        if kind == "dockerfile" and (built := self._dockerfile_registry.get(name)) is None:
            raise ConfigurationError(
                f"No registered Dockerfile metadata for {name}; call image_from_dockerfile()"
            )
        sdk = _sdk()
        if kind == "snapshot":
            params = sdk.CreateSandboxFromSnapshotParams(snapshot=name, **options)
        else:
            if self.resources is not None:
                options["resources"] = self.resources
            source = image if built is None else _image(sdk, built)
            params = sdk.CreateSandboxFromImageParams(image=source, **options)
        if self.on_snapshot_create_logs is not None:
            kwargs["on_snapshot_create_logs"] = self.on_snapshot_create_logs
        self._sandbox = self._daytona.create(params, timeout=self.create_timeout, **kwargs)
        try:
            cmd = cmd or self._discover_server_cmd((built or {}).get("server_cmd"))
            # Daytona does not run an image's CMD.
            self._exec(
                f"nohup bash -c {shlex.quote(cmd)} > /tmp/openenv-server.log 2>&1 & echo $! > /tmp/openenv-server.pid"
            )
            return self.refresh_preview_url()
        except BaseException:
            self.stop_container()
            raise

    def refresh_preview_url(self) -> str:
        """Return a new signed URL, valid for a day; clients have to reconnect with it."""
        if self._sandbox is None:
            raise RuntimeError("No active sandbox; call start_container()")
        signed_url = self._sandbox.create_signed_preview_url(PORT, expires_in_seconds=URL_LIFETIME_S)
        self._preview_url = str(signed_url.url)
        return self._preview_url

    def stop_container(self) -> None:
        """Delete the sandbox. Idempotent; call it again if it fails."""
        if self._sandbox is not None:
            self._daytona.delete(self._sandbox)
            self._sandbox = self._preview_url = None

    def wait_for_ready(self, base_url: str, timeout_s: float = 120.0) -> None:
        """Return when the server is healthy.

        Raises:
            TimeoutError: It is not healthy within `timeout_s`.
            RuntimeError: It has exited; the message contains its log.
        """

        def probe(left_s: float) -> str | None:
            trouble = healthy(base_url, min(left_s, HEALTH_TIMEOUT_S))
            alive = "kill -0 $(cat /tmp/openenv-server.pid) 2>/dev/null && echo RUNNING || echo DEAD"
            if trouble and self._sandbox is not None and "DEAD" in self._exec(alive):
                raise RuntimeError(
                    f"Server process died; its log:\n{self._exec('cat /tmp/openenv-server.log')}"
                )
            return trouble

        try:
            wait_healthy(f"the sandbox at {base_url}", probe, timeout_s, factor=REMOTE_POLL_FACTOR)
        except ServerStartError as error:
            raise TimeoutError(str(error)) from error

    def _discover_server_cmd(self, default: str | None) -> str:
        """Return the command that starts the app of `openenv.yaml` in the sandbox, or else the Dockerfile's CMD."""
        path = "/app/env/openenv.yaml"
        if "found" not in self._exec(f"test -f {path} && echo found"):
            path = self._exec("find /app -maxdepth 4 -name openenv.yaml -print -quit 2>/dev/null").strip()
        app = self._parse_app_field(self._exec(f"cat {shlex.quote(path)}")) if path.startswith("/") else None
        if app is not None:
            folder = shlex.quote(path.rpartition("/")[0])
            return f"cd {folder} && python -m uvicorn {shlex.quote(app)} --host 0.0.0.0 --port {PORT}"
        if default is not None:
            return default
        problem = f"{path} does not contain an 'app' field" if path else "Could not find openenv.yaml in /app"
        raise ConfigurationError(f"{problem}; say what starts the server as cmd")

    def _exec(self, command: str) -> str:
        reply = self._sandbox.process.exec(command, timeout=EXEC_TIMEOUT_S)
        return str(getattr(reply, "result", reply) or "")


def _sdk() -> Any:
    try:
        import daytona  # type: ignore[import-not-found,unused-ignore]  # installed by authors
    except ImportError as error:
        raise ConfigurationError(
            "DaytonaProvider stands on the package daytona; pip install daytona"
        ) from error
    return daytona


def _image(sdk: Any, built: Mapping[str, Any]) -> Any:
    """Return Daytona's image of a Dockerfile, which must be in its context while it is read."""
    file = Path(built["context_dir"], f".daytona-{uuid4().hex[:8]}.dockerfile")
    try:
        file.write_text(built["stripped_content"], encoding="utf-8")
        return sdk.Image.from_dockerfile(str(file))
    finally:
        file.unlink(missing_ok=True)
