"""How a container is to run: options for callers, and the engine's specification that they become."""

import dataclasses
import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Literal, TypeAlias, TypeGuard

from openenv_core.errors import ConfigurationError
from openenv_core.providers.base import LOOPBACK, TOKENS, first_token

RESERVED_LABELS: Final = "ropewalk."
"""Labels that begin with this are ours."""

TMPFS: Final = "rw,nosuid,nodev,noexec,size=256m,mode=1777"
"""How a writable place is mounted whose options are not given."""

LEAST_MEMORY: Final = 6 * 2**20
"""No engine starts a container with less."""

MOST_BYTES: Final = 2**63 - 1
LEAST_CPUS: Final = 0.01
MOST_CPUS: Final = 2**20
MOST_PIDS: Final = 2**22
MAX_DURATION_S: Final = 86_400.0
"""What an engine, or a clock, can still count with."""

_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)
_FACTOR: Final = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}

Reach: TypeAlias = Literal["auto", "port", "exec"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ContainerOptions:
    """The options of one container. Whatever the engine cannot honour raises; nothing is dropped silently.

    By default a container has no capabilities, cannot gain privileges, cannot write to its root and cannot
    have more than 256 processes. Each of these is switched off by its own name.

    Attributes:
        port: Where the server listens inside.
        host_port: Where it is published, on the loopback interface; None takes a port that is free.
        env_vars: Environment variables. Whoever may ask the engine can read them.
        memory: The most memory, as "512m" or in bytes; None sets no limit.
        swap: How much swap beyond `memory`; None sets no limit, for engines that cannot limit it.
        cpus: The most CPU time, in CPUs: 0.5 is half of one.
        pids: The most processes and threads; None sets no limit.
        network: "bridge"; "none" for no network at all, where the server is reached through the engine; or the
            name of a network.
        reach: How the server is reached: "port" publishes it, "exec" goes through the engine, "auto" takes
            "exec" where a published port could not be reached.
        tmpfs: Writable places, as paths, or as paths with mount options: {"/work": "size=1g,exec"}.
        gpus: "all", how many, or device ids as "0,2".
        labels: Labels of the container beside our own.
        read_only: Whether the root is read-only.
        cap_drop: Capabilities that are taken away.
        cap_add: Capabilities that are given back.
        no_new_privileges: Whether setuid programs and file capabilities are without effect.
        user: Who runs the command; None for whom the image says.
        init: Whether an init reaps processes and passes signals on.
        command: What runs instead of the image's command.
        start_timeout_s: Seconds until the server must be healthy.
        stop_timeout_s: Seconds that the server gets to end in order.

    Raises:
        ConfigurationError: A value that no engine could honour.
    """

    port: int = 8000
    host_port: int | None = None
    env_vars: Mapping[str, str] = field(default_factory=dict, repr=False)  # they may hold secrets
    memory: str | int | None = None
    swap: str | int | None = 0
    cpus: float | None = None
    pids: int | None = 256
    network: str = "bridge"
    reach: Reach = "auto"
    tmpfs: Mapping[str, str] | Sequence[str] = ("/tmp",)
    gpus: str | int | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    read_only: bool = True
    cap_drop: Sequence[str] = ("ALL",)
    cap_add: Sequence[str] = ()
    no_new_privileges: bool = True
    user: str | None = None
    init: bool = True
    command: Sequence[str] | None = None
    start_timeout_s: float = 60.0
    stop_timeout_s: float = 5.0

    def __post_init__(self) -> None:
        _require(_is_int(self.port) and 0 < self.port < 65536, "port", "1 to 65535", self.port)
        fine = self.host_port is None or (_is_int(self.host_port) and 0 < self.host_port < 65536)
        _require(fine, "host_port", "1 to 65535 or None", self.host_port)
        for name in ("env_vars", "labels"):
            _require_texts(name, getattr(self, name))
        for key in self.env_vars:
            _require(key != "" and "=" not in key, "env_vars", "names without '='", key)
        for key in self.labels:
            _require(not key.startswith(RESERVED_LABELS), "labels", f"none of {RESERVED_LABELS}*", key)
        if self.memory is not None:
            size = size_of("memory", self.memory)
            _require(size >= LEAST_MEMORY, "memory", "at least 6m", self.memory)
        if self.swap is not None:
            size_of("swap", self.swap)
            _require(self.memory is not None or self.swap == 0, "swap", "memory beside it", self.swap)
        fine = self.cpus is None or (_is_number(self.cpus) and LEAST_CPUS <= self.cpus <= MOST_CPUS)
        _require(fine, "cpus", f"{LEAST_CPUS} to {MOST_CPUS} or None", self.cpus)
        fine = self.pids is None or (_is_int(self.pids) and 0 < self.pids <= MOST_PIDS)
        _require(fine, "pids", f"1 to {MOST_PIDS} or None", self.pids)
        self._check_network()
        self._check_tmpfs()
        self._check_gpus()
        for name in ("cap_drop", "cap_add"):
            _require_list(name, getattr(self, name))
        if self.command is not None:
            _require_list("command", self.command)
            _require(len(self.command) > 0, "command", "words, or None for the image's own", self.command)
        for name in ("read_only", "no_new_privileges", "init"):
            _require(isinstance(getattr(self, name), bool), name, "True or False", getattr(self, name))
        _require(
            self.user is None or (isinstance(self.user, str) and self.user != ""), "user", "a name", self.user
        )
        self._check_times()
        # Nobody changes what has been checked.
        for name in ("env_vars", "labels", "tmpfs", "cap_drop", "cap_add", "command"):
            object.__setattr__(self, name, _frozen(getattr(self, name)))

    @property
    def memory_bytes(self) -> int | None:
        """The limit on memory in bytes."""
        return None if self.memory is None else size_of("memory", self.memory)

    @property
    def token(self) -> str | None:
        """The first bearer token of a server of ours, where its environment names any."""
        # A file of tokens is the container's own, and cannot be read from here.
        return first_token({TOKENS: self.env_vars.get(TOKENS, "")})

    @property
    def swap_bytes(self) -> int:
        """How much swap there is beyond the memory, in bytes."""
        return 0 if self.swap is None else size_of("swap", self.swap)

    @property
    def mounts(self) -> dict[str, str]:
        """The writable places, each with its mount options."""
        if isinstance(self.tmpfs, Mapping):
            return {path: options or TMPFS for path, options in self.tmpfs.items()}
        return dict.fromkeys(self.tmpfs, TMPFS)

    def _check_times(self) -> None:
        for name, least in (("start_timeout_s", 0.001), ("stop_timeout_s", 0.0)):
            seconds = getattr(self, name)
            fine = _is_number(seconds) and least <= seconds <= MAX_DURATION_S
            _require(fine, name, f"{least:g} to {MAX_DURATION_S:g} seconds", seconds)

    def _check_network(self) -> None:
        _require(isinstance(self.network, str) and self.network != "", "network", "a name", self.network)
        _require(
            self.network != "host" and not self.network.startswith("container:"),
            "network",
            '"bridge", "none" or the name of a network, which a container shares with nobody\'s host',
            self.network,
        )
        _require(self.reach in ("auto", "port", "exec"), "reach", '"auto", "port" or "exec"', self.reach)
        _require(
            self.network != "none" or self.reach != "port", "reach", '"auto" without a network', self.reach
        )

    def _check_tmpfs(self) -> None:
        if isinstance(self.tmpfs, Mapping):
            _require_texts("tmpfs", self.tmpfs)
        else:
            _require_list("tmpfs", self.tmpfs)
        for path in self.tmpfs:
            _require(path.startswith("/") and path.strip("/") != "", "tmpfs", "absolute paths below /", path)

    def _check_gpus(self) -> None:
        if self.gpus is None:
            return
        if isinstance(self.gpus, str):
            _require(self.gpus.strip(", ") != "", "gpus", '"all", a number, or device ids', self.gpus)
        else:
            _require(
                _is_int(self.gpus) and self.gpus > 0, "gpus", '"all", a number > 0, or device ids', self.gpus
            )


def options_with(options: ContainerOptions | None, fields: Mapping[str, Any]) -> ContainerOptions:
    """Return the options with some fields changed.

    Raises:
        ConfigurationError: There is no such field, or its value cannot be.
    """
    known = [each.name for each in dataclasses.fields(ContainerOptions)]
    for name in fields:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
            raise ConfigurationError(f"expected an option of a container, got {name!r}; {hint}")
    if not isinstance(options, ContainerOptions | None):
        raise ConfigurationError(f"expected options to be ContainerOptions, got {type(options).__name__}")
    return dataclasses.replace(options or ContainerOptions(), **fields)


def size_of(name: str, value: object) -> int:
    """Return a size in bytes: a number, or text as "512m".

    Raises:
        ConfigurationError: It is neither, or more than an engine can count.
    """
    size = float(value) if _is_int(value) and abs(value) <= MOST_BYTES else -1.0
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is not None:
        size = float(match[1]) * _FACTOR[match[2].lower()]
    if not 0 <= size < MOST_BYTES:
        raise ConfigurationError(f'expected {name} in bytes or as "512m" or "2g", got {value!r}')
    return value if _is_int(value) else int(size)


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _frozen(value: Any) -> Any:
    if isinstance(value, Mapping):
        return MappingProxyType(dict(value))
    return None if value is None else tuple(value)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and "\0" not in value


def _require(fine: bool, name: str, expected: str, got: object) -> None:
    if not fine:
        raise ConfigurationError(f"expected {name} to be {expected}, got {got!r}")


def _require_texts(name: str, value: object) -> None:
    fine = isinstance(value, Mapping) and all(_is_text(x) for pair in value.items() for x in pair)
    # What values there are is nobody's business.
    got = list(value) if isinstance(value, Mapping) else type(value).__name__
    _require(fine, name, "a mapping of texts to texts, without NUL", got)


def _require_list(name: str, value: object) -> None:
    fine = isinstance(value, Sequence) and not isinstance(value, str) and all(_is_text(x) for x in value)
    _require(fine, name, "a list of texts, without NUL", value)


LOG_BYTES: Final = "5m"
"""A container's log is kept in two files of this size, so that no amount of printing fills the disk."""


def spec(
    image: str, options: ContainerOptions, labels: Mapping[str, str], *, publish: bool
) -> dict[str, Any]:
    """Return the body of the request that creates the container."""
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
    if options.user is not None:
        body["User"] = options.user
    if options.command is not None:
        body["Cmd"] = list(options.command)
    return body


def dropped(asked: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Return what the engine did not take over, of what it was asked for."""
    config = found.get("Config") or {}
    lines = _differences("HostConfig", asked["HostConfig"], found.get("HostConfig"))
    for place in ("Labels", "User", "Cmd"):
        if place in asked:
            lines += _differences(place, asked[place], config.get(place))
    # The values may be secret.
    missing = [each.partition("=")[0] for each in asked["Env"] if each not in (config.get("Env") or ())]
    return lines + ([f"Env: asked {missing!r}, got none"] if missing else [])


def _host(options: ContainerOptions) -> dict[str, Any]:
    host: dict[str, Any] = {
        "NetworkMode": options.network,
        "ReadonlyRootfs": options.read_only,
        "Init": options.init,
        "Tmpfs": options.mounts,
        "LogConfig": {"Type": "json-file", "Config": {"max-size": LOG_BYTES, "max-file": "2"}},
    }
    if options.cap_drop:
        host["CapDrop"] = list(options.cap_drop)
    if options.cap_add:
        host["CapAdd"] = list(options.cap_add)
    if options.no_new_privileges:
        host["SecurityOpt"] = ["no-new-privileges"]
    if options.memory is not None:
        memory = options.memory_bytes or 0
        host["Memory"] = memory
        host["MemorySwap"] = -1 if options.swap is None else memory + options.swap_bytes
    if options.cpus is not None:
        host["NanoCpus"] = round(options.cpus * 1e9)
    if options.pids is not None:
        host["PidsLimit"] = options.pids
    if options.gpus is not None:
        host["DeviceRequests"] = [_gpus(options.gpus)]
    return host


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


def _differences(place: str, asked: Any, found: Any) -> list[str]:
    """Return where `found` lacks what was asked; it may have more."""
    if isinstance(asked, Mapping):
        if not isinstance(found, Mapping):
            return [f"{place}: asked {dict(asked)!r}, got {found!r}"] if asked else []
        return [
            line
            for key, value in asked.items()
            for line in _differences(f"{place}.{key}", value, found.get(key))
        ]
    if isinstance(asked, Sequence) and not isinstance(asked, str):
        if asked and isinstance(asked[0], Mapping):
            if not isinstance(found, Sequence) or len(found) != len(asked):
                return [f"{place}: asked {asked!r}, got {found!r}"]
            pairs = zip(asked, found, strict=True)
            return [line for a, f in pairs for line in _differences(place, a, f)]
        missing = [each for each in asked if each not in (found or ())]
        return [f"{place}: asked {missing!r}, got {found!r}"] if missing else []
    return [] if asked == found or (not asked and not found) else [f"{place}: asked {asked!r}, got {found!r}"]
