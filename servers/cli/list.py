"""`ropewalk list`: list the available environments, or those of a server."""

import argparse
import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from openenv_core.cli import Command
from openenv_core.cli.command import sanitize
from openenv_core.errors import AuthenticationError, ConnectionFailedError, ProtocolError

if TYPE_CHECKING:
    from servers.environments import ListedEnvironment

CONNECT_TIMEOUT_S: Final = 10.0
_URLS: Final = ("http://", "https://", "ws://", "wss://")
_COLUMNS: Final = ("NAME", "VERSION", "TARGET", "WHERE", "DESCRIPTION")
_MIN_DESCRIPTION: Final = 30
"""Characters of a description without which other columns are left out."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `list`."""
    parser.add_argument(
        "where",
        nargs="?",
        metavar="FOLDER|URL",
        help="list the environments of this folder or server only; by default all that can be served from here: "
        "those of the working directory, and installed ones",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    parser.add_argument("--token", help="bearer token of the server; prefer ROPEWALK_TOKEN")


def run(arguments: argparse.Namespace) -> int:
    """List the environments; broken ones are listed with their error."""
    from servers.environments import environments, environments_below

    where = arguments.where
    if where is None:
        listed = environments()
    elif where.lower().startswith(_URLS):
        listed = _ask(where, arguments.token or os.environ.get("ROPEWALK_TOKEN"))
    else:
        listed = environments_below(Path(where))
    if arguments.json:
        print(json.dumps([dataclasses.asdict(environment) for environment in listed], indent=2))
    elif listed:
        _print_table(listed)
    else:
        print("no environments here; ropewalk init NAME makes one", file=sys.stderr)
    return 0


def _ask(url: str, token: str | None) -> "list[ListedEnvironment]":
    import httpx

    from openenv_core.protocol.http import http_url
    from openenv_core.proxies import client_for
    from servers.environments import ListedEnvironment

    base = http_url(url)
    with client_for(base, token) as http:
        try:
            names = http.get(f"{base}/list_environments", timeout=CONNECT_TIMEOUT_S)
            about = http.get(f"{base}/metadata", timeout=CONNECT_TIMEOUT_S)
        except httpx.HTTPError as error:
            raise ConnectionFailedError(f"no server answers at {base}: {error!r}") from error
    if 401 in (names.status_code, about.status_code):
        raise AuthenticationError(f"expected {base} to take the token; give --token or ROPEWALK_TOKEN")
    metadata = _data(about)
    if not isinstance(metadata, dict):
        metadata = {}
    data = _data(names)
    served = [str(name) for name in data] if isinstance(data, list) else [metadata.get("name")]
    if served == [None]:
        raise ProtocolError(
            f"expected an environment server at {base}, got {names.status_code} on /list_environments and "
            f"{about.status_code} on /metadata"
        )
    return [
        ListedEnvironment(
            name=str(name),
            version=metadata.get("version"),
            description=" ".join(str(metadata.get("description") or "").split()),
            where=base,
            target=base,
        )
        for name in served
    ]


def _data(reply: Any) -> Any:
    try:
        return reply.json() if reply.status_code == 200 else None
    except ValueError:
        return None


def _print_table(listed: "Sequence[ListedEnvironment]") -> None:
    rows = [
        tuple(
            sanitize(str(cell)).replace("\n", " ")
            for cell in (
                environment.name,
                environment.version or "-",
                environment.target,
                _shorten_address(environment.where),
                environment.description,
            )
        )
        for environment in listed
    ]
    # A broken environment has another line, below, with its error.
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    sizes = [max(len(row[at]) for row in (_COLUMNS, *rows)) for at in range(len(_COLUMNS) - 1)]
    shown = list(range(len(sizes)))
    for column in ("WHERE", "VERSION", "NAME"):  # in a narrow terminal: a folder is found by the target too
        if width is not None and sum(sizes[at] + 2 for at in shown) + _MIN_DESCRIPTION > width:
            shown.remove(_COLUMNS.index(column))
    for row, environment in zip((_COLUMNS, *rows), (None, *listed), strict=True):
        cells = "".join(f"{row[at].ljust(sizes[at])}  " for at in shown)
        print(_shorten(f"{cells}{row[-1]}".rstrip(), width))
        if environment is not None and environment.error is not None:
            print(f"  broken: {sanitize(environment.error)}")


def _shorten(line: str, width: int | None) -> str:
    return line if width is None or len(line) <= width else f"{line[: max(0, width - 3)]}..."


def _shorten_address(where: str) -> str:
    """Return the shortest form of a folder: relative to the working directory, to home, or absolute."""
    path = Path(where)
    if not path.is_absolute():
        return where
    if path == Path.cwd():
        return "."
    for folder, sign in ((Path.cwd(), "."), (Path(os.path.expanduser("~")), "~")):
        if path.is_relative_to(folder):
            return f"{sign}/{path.relative_to(folder)}"
    return where


COMMAND = Command(
    name="list",
    help="list the available environments, or those of a server",
    configure=configure,
    run=run,
    examples=(
        "ropewalk list",
        "ropewalk list --json",
        "ropewalk list path/to/environments",
        "ropewalk list http://127.0.0.1:8000",
    ),
)
