"""`ropewalk doctor`: checks whether this host, or several together, are fit for a run."""

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from openenv_core.cli import Command
from rl_bridge.cli.common import (
    FAILED,
    add_overrides,
    number_type,
    overrides_first_class,
    replace_unprintable,
    with_exit_status,
)
from rl_bridge.errors import ConfigError
from rl_bridge.interface import find_free_port

if TYPE_CHECKING:
    from rl_bridge.config import Config
    from rl_bridge.doctor.collectives import Rendezvous

LOOPBACK = "127.0.0.1"
STYLES = {"good": "green", "odd": "yellow", "bad": "red"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="a run's YAML file; says where the hosts meet, and how many there are",
    )
    add_overrides(parser)
    hosts = parser.add_argument_group("several hosts: run this on each of them at about the same time")
    hosts.add_argument(
        "--num_nodes",
        type=number_type("--num_nodes", int, least=1),
        metavar="N",
        help="number of hosts; default: the file's, or 1",
    )
    hosts.add_argument("--node_rank", type=int, metavar="R", help="this host's rank, from 0")
    text = "host 0's address, where all meet; default: the file's master_addr and master_port"
    hosts.add_argument("--addr", metavar="HOST:PORT", help=text)
    text = "processes on each host; default: one per GPU, or 2 without GPUs"
    parser.add_argument("--procs", type=number_type("--procs", int, least=1), metavar="P", help=text)
    text = "MiB to send in each transfer (default: %(default)s)"
    parser.add_argument(
        "--megabytes", type=number_type("--megabytes", int, least=1), default=64, metavar="M", help=text
    )
    text = "seconds to wait for the other hosts (default: %(default)g)"
    parser.add_argument(
        "--timeout_s", type=number_type("--timeout_s", float), default=60.0, metavar="S", help=text
    )
    parser.add_argument("--json", action="store_true", help="print JSON, one line per finding")


@with_exit_status("doctor")
def run(arguments: argparse.Namespace) -> int:
    """Examine the host and print findings; returns 0, 1 if a run would fail, 2 for a bad command line."""
    from itertools import chain

    from rich.console import Console
    from rich.text import Text

    from rl_bridge.config import load_config
    from rl_bridge.doctor.collectives import check_collectives
    from rl_bridge.doctor.host import (
        Severity,
        check_imports,
        check_machine,
        check_packages,
        count_usable_gpus,
    )

    if arguments.overrides and arguments.config is None:
        raise ConfigError(f"expected --config with {arguments.overrides[0]!r}")
    config = None if arguments.config is None else load_config(arguments.config, arguments.overrides)
    gpus, failed, console = count_usable_gpus(), False, Console()
    expected_gpus = 0 if config is None or arguments.node_rank is None else config.monarch.gpus_per_node
    settings = _make_rendezvous(arguments, config, gpus=gpus)
    checks = (
        check_packages,
        check_imports,
        lambda: check_machine(gpus=gpus, expected_gpus=expected_gpus),
        lambda: check_collectives(settings),
    )
    for finding in chain.from_iterable(check() for check in checks):
        failed = failed or finding.level is Severity.BAD
        if arguments.json:
            print(json.dumps(asdict(finding)), flush=True)
        else:
            text = replace_unprintable(f"{finding.what}: {finding.told}")
            line = Text.assemble((f"{finding.level:<5}", STYLES[finding.level]), text)
            console.print(line, highlight=False, soft_wrap=True)
    return FAILED if failed else 0


def _make_rendezvous(arguments: argparse.Namespace, config: "Config | None", *, gpus: int) -> "Rendezvous":
    from rl_bridge.doctor.collectives import Rendezvous
    from rl_bridge.metrics.status import format_address, parse_address

    num_nodes, node_rank, address = arguments.num_nodes or 1, arguments.node_rank or 0, arguments.addr
    if arguments.node_rank is None and (num_nodes > 1 or address is not None):
        raise ConfigError(f"expected --node_rank with several hosts, from 0 to {num_nodes - 1}")
    if arguments.node_rank is None:
        address = format_address(LOOPBACK, find_free_port(LOOPBACK))
    elif config is not None:
        num_nodes = arguments.num_nodes or config.monarch.num_nodes
        address = address or format_address(config.monarch.master_addr, config.monarch.master_port)
    if address is None:
        raise ConfigError(
            "expected --addr HOST:PORT of host 0, where all meet, or --config FILE; got neither"
        )
    if not 0 <= node_rank < num_nodes:
        raise ConfigError(f"expected --node_rank from 0 to {num_nodes - 1}, got {node_rank}")
    parse_address(address)
    per_host = arguments.procs or gpus or 2
    return Rendezvous(
        address=address,
        num_nodes=num_nodes,
        node_rank=node_rank,
        per_host=per_host,
        on_gpus=per_host <= gpus,
        megabytes=arguments.megabytes,
        timeout_s=arguments.timeout_s,
    )


COMMAND = Command(
    name="doctor",
    help="check whether hosts are fit for a run: packages, devices, collectives, bandwidth",
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
