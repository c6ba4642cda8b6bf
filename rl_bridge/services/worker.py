"""The worker for every further host of a run: `python -m rl_bridge.services.worker tcp://10.0.0.2:26600`.

It starts the processes that a run's controller requests, ends them when the controller is gone, and then waits for the
next controller. With `--join tcp://CONTROLLER` it joins a run in progress, and ends with it. Anyone who can reach the
port can run arbitrary code here: use it on private networks only.
"""

import argparse
import asyncio
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from rl_bridge.errors import ConfigError, MissingDependencyError, RoleError
from rl_bridge.interface import name_interface
from rl_bridge.services.joining import join_run

USAGE_ERROR = 2
MAX_PORT = 65_535
ANY_HOST = frozenset({"0", "0.0.0.0", "[::]", "[0:0:0:0:0:0:0:0]"})


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until stopped; returns 1 if Monarch is missing or a run cannot be joined, 2 for an invalid argument."""
    parser = argparse.ArgumentParser(prog="python -m rl_bridge.services.worker", description=__doc__)
    parser.add_argument(
        "address",
        nargs="?",
        help="tcp://HOST:PORT, by which the controller and all other hosts reach this one",
    )
    parser.add_argument("--join", metavar="CONTROLLER", help="tcp://HOST:PORT of a run's monarch.join_port")
    parser.add_argument("--secret-file", type=Path, help="the file join.secret in that run's folder")
    arguments = parser.parse_args(argv)
    try:
        if arguments.join is not None and arguments.secret_file is not None:
            asyncio.run(join_run(arguments.join, arguments.secret_file, arguments.address))
        elif arguments.address is not None and arguments.join is None:
            serve(arguments.address)
        else:
            raise ConfigError("expected an address, or --join with --secret-file")
    except ConfigError as error:
        print(f"worker: {error}", file=sys.stderr)  # noqa: T201
        return USAGE_ERROR
    except (MissingDependencyError, RoleError) as error:
        print(f"worker: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


def serve(address: str) -> None:
    """Serve as a host of runs at an address; raises ConfigError for an address that other hosts cannot reach."""
    # Monarch identifies a host by this address, so a wildcard such as 0.0.0.0 will not do.
    match = re.fullmatch(r"tcp://(\[[0-9a-fA-F:]+\]|[^\s/:@*]+):([0-9]{1,5})", address)
    if match is None or not 1 <= int(match[2]) <= MAX_PORT:
        raise ConfigError(f"expected an address as tcp://HOST:PORT, got {address!r}")
    if match[1] in ANY_HOST:
        raise ConfigError(
            f"expected the address by which other hosts reach this one, got {address!r}, which every host calls itself"
        )
    try:
        from monarch.actor import run_worker_loop_forever
    except ImportError as error:
        raise MissingDependencyError.of_import(error) from error
    name_interface(os.environ, match[1].strip("[]"))  # inherited by all processes here
    run_worker_loop_forever(address=address, ca="trust_all_connections")


if __name__ == "__main__":
    sys.exit(main())
