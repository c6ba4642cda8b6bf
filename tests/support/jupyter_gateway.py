"""A Jupyter kernel gateway with IPython's kernels, from a separate virtual environment."""

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO

from free_ports import free_port
from missing import missing
from module_run import venv_python
from released import exchange

TOKEN = "a-token-of-the-gateway"
WAIT_TIMEOUT_S = 60.0
HOW_TO = "python3.11 scripts/bootstrap.py jupyter makes it, ./scripts/test --all does so too"


@contextmanager
def jupyter_gateway(*options: str) -> Iterator[str]:
    """Run a gateway, and yield its URL. Its kernels end with it. Without one the test is skipped, in CI fails."""
    python = venv_python("jupyter")
    if not python.is_file():
        missing(f"needs a Jupyter kernel gateway in .venvs; {HOW_TO}")
    with tempfile.TemporaryDirectory() as home, tempfile.TemporaryFile() as output:
        port = free_port()
        variables = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTHON", "JUPYTER", "KG_")) and not name.lower().endswith("_proxy")
        }
        process = subprocess.Popen(
            [
                str(python),
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
    deadline = time.monotonic() + WAIT_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        with suppress(OSError):
            status, _ = exchange(url, "GET", "/api/kernelspecs", Authorization=f"token {TOKEN}")
            assert status == 200
            return
        time.sleep(0.05)
    output.seek(0)
    raise AssertionError(f"no gateway at {url}; it said: {output.read().decode(errors='replace')[-4000:]}")
