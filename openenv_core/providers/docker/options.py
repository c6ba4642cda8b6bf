"""Options of a container, and their conversion to the engine's API."""

import difflib
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Final, Self, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from openenv_core.errors import ConfigurationError, describe_faults
from openenv_core.providers.base import LOOPBACK, TOKENS, read_first_token

RESERVED_LABELS: Final = "ropewalk."
"""Prefix of labels that only we may set."""

TMPFS: Final = "rw,nosuid,nodev,noexec,size=256m,mode=1777"
"""Default mount options of writable folders."""

MIN_MEMORY_BYTES: Final = 6 * 2**20
"""Docker's minimum."""

MAX_BYTES: Final = 2**63 - 1
MIN_CPUS: Final = 0.01
MAX_CPUS: Final = 2**20
MAX_PIDS: Final = 2**22
MAX_DURATION_S: Final = 86_400.0
"""Maximum that engines and clocks can handle."""

_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)
_FACTOR: Final = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def size_of(name: str, value: object) -> int:
    """Return a size in bytes, given as a number or as text like "512m".

    Raises:
        ConfigurationError: The value is neither, or too large.
    """
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    size = float(match[1]) * _FACTOR[match[2].lower()] if match is not None else -1.0
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_BYTES:
        return value
    if not 0 <= size < MAX_BYTES:
        raise ConfigurationError(f'expected {name} in bytes or as "512m" or "2g", got {value!r}')
    return int(size)


def _size(value: str | int) -> str | int:
    size_of("a size", value)
    return value


def _frozen(value: Mapping[str, str]) -> Mapping[str, str]:
    return MappingProxyType(dict(value))


Text: TypeAlias = Annotated[str, Field(pattern=r"\A[^\x00]*\z")]
TextSequence: TypeAlias = Annotated[Sequence[Text], AfterValidator(tuple)]
Port: TypeAlias = Annotated[int, Field(gt=0, lt=65536)]
Size: TypeAlias = Annotated[str | int, AfterValidator(_size)]
Folder: TypeAlias = Annotated[str, Field(pattern=r"\A/+[^/\x00][^\x00]*\z")]
Variable: TypeAlias = Annotated[str, Field(pattern=r"\A[^=\x00]+\z")]


class ContainerOptions(BaseModel):
    """The options of a container. An option that the engine does not support raises; none is dropped silently.

    By default a container has no capabilities, cannot gain privileges, has a read-only root and at most 256 processes.
    Each of these restrictions has its own option.

    Attributes:
        port: The server's port in the container.
        host_port: Port on the loopback interface under which it is published; None for a free one.
        env_vars: Environment variables. Anyone with access to the engine can read them.
        memory: Memory limit, as "512m" or in bytes; None for no limit.
        swap: Swap in addition to `memory`; None for no limit, for engines that cannot limit it.
        cpus: CPU limit: 0.5 is half a CPU.
        pids: Maximum number of processes and threads; None for no limit.
        network: "bridge", the name of a network, or "none" for no network, in which case the server is reached through
            the engine.
        tmpfs: Writable folders, as paths, or with mount options: {"/work": "size=1g,exec"}.
        gpus: "all", a number, or device ids such as "0,2".
        labels: Additional labels of the container.
        read_only: Whether the root file system is read-only.
        cap_drop: Capabilities to drop.
        cap_add: Capabilities to add back.
        no_new_privileges: Whether setuid programs and file capabilities have no effect.
        user: User of the command; None for the image's.
        init: Whether an init process reaps zombies and forwards signals.
        entrypoint: Overrides the image's entry point.
        command: Overrides the image's command.
        start_timeout_s: Seconds within which the server must become healthy.
        stop_timeout_s: Seconds that the server has to shut down.

    Raises:
        ConfigurationError: A value is invalid.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", hide_input_in_errors=True)

    port: Port = 8000
    host_port: Port | None = None
    # repr=False: they may contain secrets.
    env_vars: Annotated[Mapping[Variable, Text], AfterValidator(_frozen)] = Field(
        default_factory=lambda: _frozen({}), repr=False
    )
    memory: Size | None = None
    swap: Size | None = 0
    cpus: Annotated[float, Field(ge=MIN_CPUS, le=MAX_CPUS)] | None = None
    pids: Annotated[int, Field(gt=0, le=MAX_PIDS)] | None = 256
    network: Annotated[str, Field(pattern=r"\A[^\x00]+\z")] = "bridge"
    tmpfs: (
        Annotated[Mapping[Folder, Text], AfterValidator(_frozen)]
        | Annotated[Sequence[Folder], AfterValidator(tuple)]
    ) = ("/tmp",)
    gpus: Annotated[str, Field(pattern=r"[^, ]")] | Annotated[int, Field(gt=0)] | None = None
    labels: Annotated[Mapping[Text, Text], AfterValidator(_frozen)] = Field(
        default_factory=lambda: _frozen({})
    )
    read_only: bool = True
    cap_drop: TextSequence = ("ALL",)
    cap_add: TextSequence = ()
    no_new_privileges: bool = True
    user: Annotated[str, Field(pattern=r"\A[^\x00]+\z")] | None = None
    init: bool = True
    entrypoint: Annotated[TextSequence, Field(min_length=1)] | None = None
    command: Annotated[TextSequence, Field(min_length=1)] | None = None
    start_timeout_s: Annotated[float, Field(ge=0.001, le=MAX_DURATION_S)] = 60.0
    stop_timeout_s: Annotated[float, Field(ge=0.0, le=MAX_DURATION_S)] = 5.0

    if not TYPE_CHECKING:  # type checkers take the parameters from the fields

        def __init__(self, **fields: Any) -> None:
            try:
                super().__init__(**fields)
            except ValidationError as error:
                faults = describe_faults(error, "options")
                raise ConfigurationError(
                    f"expected options that a container can have, got {faults}"
                ) from None

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if any(label.startswith(RESERVED_LABELS) for label in self.labels):
            raise ValueError(f"labels that begin with {RESERVED_LABELS} are taken")
        if self.memory is not None and size_of("memory", self.memory) < MIN_MEMORY_BYTES:
            raise ValueError("memory has to be at least 6m")
        if self.swap and self.memory is None:
            raise ValueError("swap goes beyond memory, which has no limit")
        if self.network == "host" or self.network.startswith("container:"):
            raise ValueError(
                "network has to be one that is shared with nobody's host: bridge, none, or a name"
            )
        return self

    @property
    def memory_bytes(self) -> int | None:
        """The memory limit in bytes."""
        return None if self.memory is None else size_of("memory", self.memory)

    @property
    def token(self) -> str | None:
        """The first bearer token in the server's environment variables, if any."""
        # A token file is inside the container and cannot be read from here.
        return read_first_token({TOKENS: self.env_vars.get(TOKENS, "")})


def options_with(options: ContainerOptions | None, fields: Mapping[str, Any]) -> ContainerOptions:
    """Return the options with some fields replaced.

    Raises:
        ConfigurationError: A field is unknown, or its value invalid.
    """
    known = ContainerOptions.model_fields
    for name in fields:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
            raise ConfigurationError(f"expected an option of a container, got {name!r}; {hint}")
    if not isinstance(options, ContainerOptions | None):
        raise ConfigurationError(f"expected options to be ContainerOptions, got {type(options).__name__}")
    options_set = (
        {} if options is None else {name: getattr(options, name) for name in options.model_fields_set}
    )
    return ContainerOptions(**{**options_set, **fields})


LOG_BYTES: Final = "5m"
"""Size of each of a container's two log files, so that its output cannot fill the disk."""


def spec(
    image: str, options: ContainerOptions, labels: Mapping[str, str], *, publish: bool
) -> dict[str, Any]:
    """Return the body of the request that creates a container."""
    port = f"{options.port}/tcp"
    body: dict[str, Any] = {
        "Image": image,
        "Env": [f"{name}={value}" for name, value in options.env_vars.items()],
        "Labels": {**options.labels, **labels},
        "ExposedPorts": {port: {}},
        "HostConfig": _host(options),
    }
    if publish:
        body["HostConfig"]["PortBindings"] = {
            port: [
                {"HostIp": LOOPBACK, "HostPort": "" if options.host_port is None else str(options.host_port)}
            ]
        }
    return body | _present(User=options.user, Entrypoint=options.entrypoint, Cmd=options.command)


def _present(**fields: Any) -> dict[str, Any]:
    """Return the fields that have a value; tuples as lists, as JSON has them."""
    return {
        name: list(value) if isinstance(value, tuple) else value for name, value in fields.items() if value
    }


def find_dropped(requested: Mapping[str, Any], actual: Mapping[str, Any]) -> list[str]:
    """Return the requested options that the engine did not apply."""
    host, config = actual.get("HostConfig") or {}, actual.get("Config") or {}
    pairs = {f"HostConfig.{name}": (asked, host.get(name)) for name, asked in requested["HostConfig"].items()}
    for name in requested.keys() & {"Labels", "User", "Entrypoint", "Cmd"}:
        pairs[name] = requested[name], config.get(name)
    lines = [
        f"{place}: asked {asked!r}, got {got!r}"
        for place, (asked, got) in pairs.items()
        if not _has(got, asked)
    ]
    # Only names, because the values may be secrets.
    missing = [each.partition("=")[0] for each in requested["Env"] if each not in (config.get("Env") or ())]
    return lines + ([f"Env: asked {missing!r}, got none"] if missing else [])


def _host(options: ContainerOptions) -> dict[str, Any]:
    places = options.tmpfs if isinstance(options.tmpfs, Mapping) else dict.fromkeys(options.tmpfs, "")
    memory = options.memory_bytes
    host = {
        "NetworkMode": options.network,
        "ReadonlyRootfs": options.read_only,
        "Init": options.init,
        "Tmpfs": {path: mount_options or TMPFS for path, mount_options in places.items()},
        "LogConfig": {"Type": "json-file", "Config": {"max-size": LOG_BYTES, "max-file": "2"}},
    }
    if memory is not None:
        host["MemorySwap"] = -1 if options.swap is None else memory + size_of("swap", options.swap)
    return host | _present(
        CapDrop=options.cap_drop,
        CapAdd=options.cap_add,
        SecurityOpt=options.no_new_privileges and ["no-new-privileges"],
        Memory=memory,
        NanoCpus=options.cpus and round(options.cpus * 1e9),
        PidsLimit=options.pids,
        DeviceRequests=options.gpus and [_gpus(options.gpus)],
    )


def _gpus(gpus: str | int) -> dict[str, Any]:
    request: dict[str, Any] = {"Driver": "", "Capabilities": [["gpu"]]}
    if isinstance(gpus, int):
        request["Count"] = gpus
    elif gpus == "all":
        request["Count"] = -1
    else:
        ids = gpus.removeprefix("device=").split(",")
        request["DeviceIDs"] = [each.strip() for each in ids if each.strip()]
    return request


def _has(actual: Any, requested: Any) -> bool:
    """Whether what was applied has all that was requested; it may have more."""
    if isinstance(requested, Mapping):
        return all(_has((actual or {}).get(key), one) for key, one in requested.items())
    if not requested:
        return not actual
    if isinstance(requested, list):
        return all(any(_has(each, one) for each in actual or ()) for one in requested)
    return bool(actual == requested)
