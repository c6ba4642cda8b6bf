"""What the engine is asked for, and whether it did it."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from openenv_core.providers.docker.options import ContainerOptions
from openenv_core.providers.health import LOOPBACK

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
