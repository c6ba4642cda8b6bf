"""`ropewalk doctor`: is this host, and are several together, fit for a run."""

import argparse
import json
import random
import socket
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING

from openenv_core.cli import Command
from rl_bridge.cli.common import FAILED, exit_status, overrides_first_class, printable
from rl_bridge.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rl_bridge.config import Config
    from rl_bridge.doctor.findings import Finding
    from rl_bridge.doctor.roll_call import Meeting

HERE = "127.0.0.1"
OWN_PORTS = (20_000, 32_768)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("--config", metavar="FILE", help="also look for what this run counts on")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="change a key of the file")
    hosts = parser.add_argument_group("several hosts: run this on each of them at about the same time")
    hosts.add_argument("--num_nodes", type=int, metavar="N", help="hosts; by default the file's, or 1")
    hosts.add_argument("--node_rank", type=int, metavar="R", help="which of them this one is, from 0")
    hosts.add_argument(
        "--addr",
        metavar="HOST:PORT",
        help="of host 0, where they meet; by default the file's master_addr, master_port",
    )
    parser.add_argument(
        "--procs", type=int, metavar="P", help="processes that compute together on each host: one a GPU, or 2"
    )
    parser.add_argument(
        "--megabytes", type=int, default=64, metavar="M", help="what they send each other (%(default)s MiB)"
    )
    parser.add_argument(
        "--timeout_s",
        type=float,
        default=60.0,
        metavar="S",
        help="how long they wait for each other (%(default)g)",
    )
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each finding")


def run(arguments: argparse.Namespace) -> int:
    """Look and print; returns 0, 1 where a run would fail, 2 if it was asked for wrongly."""
    return exit_status("doctor", lambda: _diagnose(arguments))


def _diagnose(arguments: argparse.Namespace) -> int:
    from rl_bridge.config import load_config
    from rl_bridge.doctor.findings import Severity

    if arguments.overrides and arguments.config is None:
        raise ConfigError(f"expected --config with {arguments.overrides[0]!r}")
    config = None if arguments.config is None else load_config(arguments.config, arguments.overrides)
    failed = False
    for finding in _findings(arguments, config):
        failed = failed or finding.level is Severity.BAD
        _print(finding, as_json=arguments.json)
    return FAILED if failed else 0


def _findings(arguments: argparse.Namespace, config: "Config | None") -> "Iterator[Finding]":
    from rl_bridge.doctor.cluster import cluster
    from rl_bridge.doctor.machine import machine, packages, usable_gpus
    from rl_bridge.doctor.meeting import meet

    gpus = usable_gpus()
    meeting = _meeting(arguments, config, gpus=gpus)
    yield from packages()
    yield from machine()
    if config is not None:
        yield from cluster(config, gpus=gpus, node_rank=arguments.node_rank)
    yield from meet(meeting)


def _meeting(arguments: argparse.Namespace, config: "Config | None", *, gpus: int) -> "Meeting":
    from rl_bridge.doctor.roll_call import Meeting
    from rl_bridge.metrics.status import format_address, parse_address

    for name, least in (("num_nodes", 1), ("procs", 1), ("megabytes", 1), ("timeout_s", 0.001)):
        if (given := getattr(arguments, name)) is not None and not least <= given < float("inf"):
            raise ConfigError(f"expected --{name} of at least {least}, got {given:g}")
    alone = arguments.node_rank is None and arguments.num_nodes in (None, 1)
    if alone and arguments.addr is not None:
        raise ConfigError(
            f"expected --num_nodes and --node_rank with --addr {arguments.addr}, where several hosts meet"
        )
    monarch = None if config is None else config.monarch
    num_nodes = arguments.num_nodes or (1 if alone or monarch is None else monarch.num_nodes)
    address = arguments.addr
    if address is None:
        if alone:
            address = format_address(HERE, _free_port())
        elif monarch is None:
            raise ConfigError(
                "expected --addr HOST:PORT of host 0, where all meet, or --config FILE; got neither"
            )
        else:
            address = format_address(monarch.master_addr, monarch.master_port)
    parse_address(address)
    node_rank = 0 if alone else arguments.node_rank
    if node_rank is None or not 0 <= node_rank < num_nodes:
        raise ConfigError(f"expected --node_rank from 0 to {num_nodes - 1}, got {node_rank}")
    per_host = arguments.procs or gpus or 2
    return Meeting(
        address=address,
        num_nodes=num_nodes,
        node_rank=node_rank,
        per_host=per_host,
        on_gpus=0 < per_host <= gpus,
        megabytes=arguments.megabytes,
        timeout_s=arguments.timeout_s,
    )


def _free_port() -> int:
    """Below those that the kernel gives to whoever connects: seconds pass until it is listened on."""
    while True:
        port = random.randrange(*OWN_PORTS)
        with suppress(OSError), socket.create_server((HERE, port)):
            return port


def _print(finding: "Finding", *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(asdict(finding)), flush=True)
        return
    from rich.console import Console
    from rich.text import Text

    styles = {"good": "green", "odd": "yellow", "bad": "red"}
    told = printable(f"{finding.what}: {finding.told}")
    line = Text.assemble((f"{finding.level:<5}", styles[finding.level]), told)
    Console().print(line, highlight=False, soft_wrap=True)


COMMAND = Command(
    name="doctor",
    help="look whether hosts are fit for a run: packages, devices, collectives, bandwidth",
    configure=configure,
    run=run,
    reword=overrides_first_class,
    examples=(
        "ropewalk doctor",
        "ropewalk doctor --config cluster.yaml",
        "ropewalk doctor --num_nodes 8 --node_rank 3 --addr 10.0.0.1:29500",
        "ropewalk doctor --config cluster.yaml --node_rank 3 --json",
    ),
)
