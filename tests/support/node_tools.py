"""Node and the npm packages of constraints/node, installed by scripts/node-tools."""

import os
from pathlib import Path

from missing import missing

INSTALLED = Path(__file__).parents[2] / ".venvs" / "node"
HOW_TO = "get them with ./scripts/node-tools, which ./scripts/test --all runs"


def node() -> str:
    """Return the path of Node; if it is missing, the test is skipped, and in CI fails."""
    builds = sorted(INSTALLED.glob("node_modules/node-*/bin/node"))
    if not (INSTALLED / ".ready").is_file() or not builds:
        missing(f"needs Node and the npm packages of constraints/node; {HOW_TO}")
    return str(builds[0])


def script(package: str, file: str = "dist/index.js") -> list[str]:
    """Return the command that runs a package's script with our Node."""
    path = INSTALLED / "node_modules" / package / file
    runner = node()
    if not path.is_file():
        missing(f"needs the npm package {package}, which .venvs/node lacks; {HOW_TO}")
    return [runner, str(path)]


def environ() -> dict[str, str]:
    """Return this process's variables, with our Node and the packages' commands first on the path."""
    places = [str(Path(node()).parent), str(INSTALLED / "node_modules" / ".bin"), os.environ["PATH"]]
    return {**os.environ, "PATH": os.pathsep.join(places)}
