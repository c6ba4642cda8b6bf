"""The released packages, each in its own virtual environment, and servers in separate processes."""

import json
import os
import site
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from module_run import ROOT, finished, venv_python

DRIVERS = ROOT / "tests" / "interop" / "drivers"

VERSIONS = ("0.10.0", "0.3.1", "0.2.3", "0.1.1")
OVER_SOCKETS = ("0.10.0", "0.3.1", "0.2.3")
"""The versions with WebSocket; 0.1 has only plain HTTP."""

NAME = "walk_env"
"""Name of the scaffold."""

# Importing a released package takes up to ten seconds on an idle machine.
WAIT_TIMEOUT_S = 200

HOW_TO = "python3.11 scripts/bootstrap.py released-VERSION makes each of them, ./scripts/test --all makes all"


def python(version: str) -> Path:
    return venv_python(f"released-{version}")


def missing() -> list[str]:
    return [f"released-{version}" for version in VERSIONS if not python(version).is_file()]


def environment(**variables: str) -> dict[str, str]:
    """Return the environment variables of a child process: without PYTHON* and proxies of this one."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    kept = {name: value for name, value in kept.items() if not name.lower().endswith("_proxy")}
    return {**kept, "PYTHONWARNINGS": "ignore", "NO_PROXY": "*", **variables}


def scaffold(version: str, folder: Path) -> Path:
    """Create an environment with a release's own `init`, and return its folder."""
    command = [str(python(version).parent / "openenv"), "init", NAME, "--output-dir", str(folder)]
    done = finished(*command, env=environment(), cwd=folder, timeout_s=WAIT_TIMEOUT_S)
    folders = [path.parent.parent for path in folder.rglob("server/app.py")]
    assert len(folders) == 1, done.stdout + done.stderr
    return folders[0]


def borrowed(version: str, folder: Path) -> Path:
    """Link packages of a release's environment that this one lacks, such as fastmcp, into a folder.

    The release itself is left out: it cannot be in one process with ours.
    """
    (there,) = python(version).parents[1].glob("lib/python*/site-packages")
    here = {name for path in map(Path, site.getsitepackages()) for name in map(_name, path.iterdir())}
    for path in there.iterdir():
        if _name(path) not in here and not path.name.startswith("openenv") and path.suffix != ".pth":
            (folder / path.name).symlink_to(path)
    return folder


def _name(path: Path) -> str:
    """Return the package of an installed file, without its version."""
    return path.name.partition("-")[0].lower() if path.suffix == ".dist-info" else path.name


@contextmanager
def released_server(version: str, app: str, cwd: Path, **variables: str) -> Iterator[str]:
    """Serve an app like its release's own images: uvicorn, one process."""
    command = [str(python(version)), "-m", "uvicorn", app, "--log-level", "warning"]
    with _serving(command, cwd, environment(**variables)) as url:
        yield url


@contextmanager
def our_server(
    target: str, *options: str, cwd: Path = ROOT, packages: Path | None = None, **variables: str
) -> Iterator[str]:
    command = [sys.executable, "-m", "openenv_core.cli", "serve", target, "--log-level", "warning", *options]
    path = os.pathsep.join(map(str, filter(None, (ROOT, ROOT / "tests" / "support", packages))))
    with _serving(command, cwd, environment(PYTHONPATH=path, **variables)) as url:
        yield url


@contextmanager
def _serving(command: Sequence[str], cwd: Path, variables: Mapping[str, str]) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener, tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [*command, "--fd", str(listener.fileno())],
            cwd=cwd,
            env=dict(variables),
            pass_fds=[listener.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
        try:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            listener.close()
            _healthy(url, process, output)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(60)  # one that does not end when it is asked to is a failure
            finally:
                process.kill()
                process.wait()


def _healthy(url: str, process: "subprocess.Popen[bytes]", output: IO[bytes]) -> None:
    deadline = time.monotonic() + WAIT_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(OSError):
            if exchange(url, "GET", "/health", patience_s=5)[0] == 200:
                return
        time.sleep(0.1)
    output.seek(0)
    raise AssertionError(f"no healthy server at {url}; it said: {output.read().decode()[-4000:]}")


def exchange(
    url: str, method: str, path: str, body: Any = None, *, patience_s: float = 30, **headers: str
) -> tuple[int, Any]:
    """Send one plain HTTP request and return the status and the body, parsed if it is JSON."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(
        url + path, data, {"content-type": "application/json", **headers}, method=method
    )
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
            request, timeout=patience_s
        ) as reply:
            status, text = reply.status, reply.read()
    except urllib.error.HTTPError as error:
        with error:
            status, text = error.code, error.read()
    try:
        return status, json.loads(text)
    except ValueError:
        return status, text.decode()


def drive(version: str | None, driver: str, *arguments: str, plan: Any = None, cwd: Path = ROOT) -> Any:
    """Run a driver with a release's Python, or ours, and return the JSON in its last line."""
    interpreter = sys.executable if version is None else str(python(version))
    variables = environment(**({"PYTHONPATH": str(ROOT)} if version is None else {}))
    done = finished(
        interpreter,
        str(DRIVERS / f"{driver}.py"),
        *arguments,
        input=json.dumps(plan),
        env=variables,
        cwd=cwd,
        timeout_s=WAIT_TIMEOUT_S,
    )
    assert done.returncode == 0, f"{driver} with {version or 'our own client'}:\n{done.stdout}\n{done.stderr}"
    return json.loads(done.stdout.splitlines()[-1])
