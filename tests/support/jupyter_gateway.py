"""A Jupyter kernel gateway with IPython's kernels, from a separate virtual environment."""

import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from free_ports import free_port
from missing import missing

ROOT = Path(__file__).parents[2]
TOKEN = "a-token-of-the-gateway"
WAIT_TIMEOUT_S = 60.0
HOW_TO = "python3.11 scripts/bootstrap.py jupyter makes it, ./scripts/test --all does so too"


def python() -> Path:
    suffix = "" if sys.version_info[:2] == (3, 11) else f"-{sys.version_info.major}.{sys.version_info.minor}"
    return ROOT / ".venvs" / f"jupyter{suffix}" / "bin" / "python"


def require_gateway() -> None:
    """Skip the test if no gateway is installed; in CI fail it."""
    if python().is_file():
        return
    missing(f"needs a Jupyter kernel gateway in .venvs; {HOW_TO}")


@contextmanager
def jupyter_gateway(*options: str) -> Iterator[str]:
    """Run a gateway, and yield its URL. Its kernels end with it."""
    require_gateway()
    with tempfile.TemporaryDirectory() as home, tempfile.TemporaryFile() as output:
        port = free_port()
        variables = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
        variables = {
            name: value
            for name, value in variables.items()
            if not name.startswith(("PYTHON", "JUPYTER", "KG_"))
        }
        process = subprocess.Popen(
            [
                str(python()),
                "-m",
                "kernel_gateway",
                "--KernelGatewayApp.ip=127.0.0.1",
                f"--KernelGatewayApp.port={port}",
                "--KernelGatewayApp.port_retries=0",
                *options,
            ],
            cwd=home,
            env=variables
            | {"HOME": home, "TMPDIR": home, "KG_AUTH_TOKEN": TOKEN, "PYTHONWARNINGS": "ignore"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            url = f"http://127.0.0.1:{port}"
            _await_answer(url, process, output)
            yield url
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(3)
            with suppress(ProcessLookupError):  # kernels left by a gateway that died
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _await_answer(url: str, process: "subprocess.Popen[bytes]", output: IO[bytes]) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(url + "/api/kernelspecs", headers={"Authorization": f"token {TOKEN}"})
    deadline = time.monotonic() + WAIT_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with opener.open(request, timeout=5):
                return
        except urllib.error.HTTPError as error:
            error.close()
            raise AssertionError(f"the gateway answers with HTTP {error.code}") from None
        except OSError:
            time.sleep(0.05)
    output.seek(0)
    raise AssertionError(f"no gateway at {url}; it said: {output.read().decode(errors='replace')[-4000:]}")
