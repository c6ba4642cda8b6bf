"""Whether what a configuration counts on is there: GPUs, addresses, ports, the checkpoint."""

import errno
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

from rl_bridge.config import Config
from rl_bridge.doctor.findings import Finding, Severity
from rl_bridge.interface import listen
from rl_bridge.metrics.status import format_address

CONNECT_TIMEOUT_S = 5.0
AT_ONCE = 32
PORTS = {"http": 80, "ws": 80, "https": 443, "wss": 443}
"""Where no port is named; Monarch's addresses name theirs."""


def cluster(config: Config, *, gpus: int, node_rank: int | None = None) -> list[Finding]:
    """Look at what a run would need, from the host that its controller will be on, or from another of its hosts.

    Args:
        config: The run.
        gpus: Those of this host.
        node_rank: Which of `monarch.num_nodes` hosts this one is, where it was said; the controller is on the first.
    """
    ports = _ports(config) if not node_rank else ()
    return [*_gpus(config, gpus, node_rank), *ports, *_others(config), *_model(config)]


def _gpus(config: Config, gpus: int, node_rank: int | None) -> Iterator[Finding]:
    monarch, level = config.monarch, Severity.GOOD
    if node_rank is not None:
        what, there = "GPUs of this host", monarch.gpus_per_node
        told = f"monarch.gpus_per_node says {there}, {gpus} are here"
        if there > gpus:
            told, level = f"{told}; see why torch can use no more, or say fewer", Severity.BAD
    elif monarch.alone:  # otherwise they are on other hosts, where this can be asked again
        what, needed = "GPUs of the roles", monarch.gpus
        if monarch.colocate is None:  # see colocate_if_needed
            needed = monarch.roles.most_gpus()
        told = f"the roles use {needed}, {gpus} are here"
        if needed > gpus:
            told += "; give the roles fewer (trainer.num_gpus=0 is the CPU), or name the hosts that have them"
            level = Severity.BAD
    else:
        return
    yield Finding(what=what, told=told, level=level)


def _ports(config: Config) -> Iterator[Finding]:
    """Those that the controller listens on."""
    monarch = config.monarch
    wanted = {"monarch.coord_port": monarch.coord_port}
    if not monarch.alone:
        wanted["monarch.master_port"] = monarch.master_port
    for key, port in wanted.items():
        where, level = format_address(monarch.master_addr, port), Severity.GOOD
        told = f"{where} is free" if port else f"0: any port of {monarch.master_addr} that is free"
        try:
            listen(monarch.master_addr, port)
        except OSError as error:
            told, level = f"cannot listen on {where}: {error.strerror or error}", Severity.BAD
            if error.errno == errno.EADDRNOTAVAIL:
                told = f"{where} is no address of this host: ask on the one that it belongs to"
                if monarch.alone:  # see host_to_serve_on
                    told += "; a run that is alone here serves its status on loopback"
                    level = Severity.ODD
        yield Finding(what=key, told=told, level=level)


def _others(config: Config) -> Iterator[Finding]:
    """Servers and workers that somebody else has started."""
    urls = (url for env in config.environments.values() for url in env.urls)
    places = dict.fromkeys((*config.monarch.workers, *urls, *filter(None, (config.generator.url,))))
    with ThreadPoolExecutor(AT_ONCE) as asking:
        yield from asking.map(_reached, places)


def _reached(url: str) -> Finding:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or PORTS.get(parts.scheme)
        if not host or port is None:
            raise ValueError(f"expected an address such as http://HOST:PORT or tcp://HOST:PORT, got {url!r}")
        socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S).close()
    except (OSError, ValueError) as error:
        told = f"cannot be reached from here: {getattr(error, 'strerror', None) or error}"
        return Finding(what=url, told=told, level=Severity.BAD)
    return Finding(what=url, told="somebody listens there")


def _model(config: Config) -> Iterator[Finding]:
    if config.model.path is None:
        return
    folder, level = Path(config.model.path).expanduser(), Severity.GOOD
    told = f"{folder} has a config.json"
    if not (folder / "config.json").is_file():
        told = f"expected a checkpoint in the Hugging Face layout at {folder}, found no config.json there"
        level = Severity.BAD
    yield Finding(what="model.path", told=told, level=level)
