"""`ropewalk fleet`: starts, watches, resizes, updates and ends fleets of environment servers."""

import argparse
import json
import os
import time
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from openenv_core.cli.command import Command, read_count, read_object, read_seconds
from openenv_core.errors import ConfigurationError

if TYPE_CHECKING:
    from openenv_core.providers.fleet import ServerFleet

LOOK_INTERVAL_S: Final = 5.0
"""Seconds between looks at the queue."""

ACTS: Final = ("up", "status", "scale", "drain", "down")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `fleet`."""
    from openenv_core.providers.fleet import ENGINES

    add = parser.add_argument
    add("act", choices=ACTS, help="drain: replace every server, or one; the others: as they are named")
    add("engine", choices=list(ENGINES), help="where the servers run")
    add("name", metavar="NAME", help="the fleet's name")
    add("target", nargs="?", metavar="TARGET|SERVERS|SERVER", help="of up, scale and drain")
    add("--servers", type=read_count, default=1, help="up: the number of servers (%(default)s)")
    add(
        "--options",
        type=read_object,
        default={},
        metavar="JSON",
        help='up: further arguments of the fleet\'s class, such as {"num_cpus": 2}',
    )
    add(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="up: the token of the servers, which is made if there is no such file (NAME.token)",
    )
    add(
        "--between",
        nargs=2,
        type=read_count,
        metavar=("MIN", "MAX"),
        help="scale: follow the queue until Ctrl-C",
    )
    add(
        "--timeout",
        type=read_seconds,
        metavar="SECONDS",
        help="scale: for the sessions of servers that leave (3600)",
    )
    add("--json", action="store_true", help="status: print a JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Do the act; return the exit status.

    Raises:
        ConfigurationError: The arguments do not go together.
        ProviderError: There is no such fleet, or its engine does not do it in time.
    """
    from openenv_core.providers.fleet import fleet_class

    find_fleet = fleet_class(arguments.engine).find
    fleet = _new_fleet(arguments) if arguments.act == "up" else find_fleet(arguments.name)
    _act(fleet, arguments)
    _print_status(fleet, as_json=arguments.json)
    return 0


def _new_fleet(arguments: argparse.Namespace) -> "ServerFleet":
    from openenv_core.providers.base import TOKEN_FILE, read_first_token
    from openenv_core.providers.fleet import fleet_class, open_fleet

    if arguments.target is None:
        raise ConfigurationError("expected what to serve after the fleet's name: an environment, or an image")
    token_file = arguments.token_file or Path(f"{arguments.name}.token")
    options: dict[str, Any] = {"name": arguments.name, "detached": True, **arguments.options}
    token = read_first_token({TOKEN_FILE: str(token_file)})
    if token is not None and "token" in signature(fleet_class(arguments.engine)).parameters:
        options.setdefault("token", token)
    fleet = open_fleet(arguments.engine, arguments.target, arguments.servers, options)
    if not token_file.exists():
        with open(
            os.open(token_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8"
        ) as file:
            file.write(f"{fleet.token}\n")
    elif token != fleet.token:
        raise ConfigurationError(f"{token_file} does not have the servers' token; remove it, or name another")
    return fleet


def _act(fleet: "ServerFleet", arguments: argparse.Namespace) -> None:
    act, target = arguments.act, arguments.target
    if act == "up":
        fleet.start()
    elif act == "scale" and arguments.between is not None:
        least, most = arguments.between
        fleet.autoscale(least, most, lambda: time.sleep(LOOK_INTERVAL_S))
    elif act == "scale":
        if target is None:
            raise ConfigurationError(
                "expected the number of servers after the fleet's name, or --between MIN MAX"
            )
        wait = {} if arguments.timeout is None else {"idle_timeout_s": arguments.timeout}
        fleet.scale(read_count(target), **wait)
    elif act == "drain" and target is not None:
        fleet.replace(target)
    elif act == "drain":
        fleet.roll()
    elif act == "down":
        fleet.stop()


def _print_status(fleet: "ServerFleet", *, as_json: bool) -> None:
    from openenv_core.providers.fleet import read_load

    rows = []
    for server in fleet.servers():
        load = read_load(server.url, fleet.token) if server.ready and server.url else None
        rows.append((server, load))
    if as_json:
        servers = [
            {name: getattr(server, name) for name in ("name", "url", "ready")}
            | {"sessions": load and load.in_use, "waiting": load and load.waiting}
            for server, load in rows
        ]
        print(json.dumps({"name": fleet.name, "servers": servers}, indent=2))
        return
    for server, load in rows:
        state = (
            "not ready" if load is None else f"{load.in_use} of {load.slots} sessions, {load.waiting} waiting"
        )
        print(f"{server.name}  {server.url or '-'}  {state}")
    if not rows:
        print(f"{fleet.name} has no servers")


COMMAND: Final = Command(
    name="fleet",
    help="run fleets of environment servers on Ray, Docker or Kubernetes",
    configure=configure,
    run=run,
    examples=(
        "ropewalk fleet up ray games blackjack --servers 8",
        "ropewalk fleet status ray games",
        "ropewalk fleet scale ray games 4",
        "ropewalk fleet scale ray games --between 2 16",
        "ropewalk fleet drain ray games",
        "ropewalk fleet down ray games",
    ),
)
