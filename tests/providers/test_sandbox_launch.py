"""The port that a command in a sandbox is told of is nobody else's, also before it listens."""

import base64
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

LAUNCHER = Path(__file__).parents[2] / "servers" / "sandboxes" / "_launch.py"

COMMAND = """
import os, socket, sys
assert os.environ["PORT"] == sys.argv[1]
print("before", flush=True)
sys.stdin.readline()
with socket.create_server(("127.0.0.1", int(sys.argv[1]))):
    print("listening", flush=True)
    sys.stdin.readline()
"""


def test_the_port_is_held_until_the_command_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        words = json.dumps([sys.executable, "-c", COMMAND, "{port}"])
        packed = base64.urlsafe_b64encode(words.encode()).decode()
        fd = os.dup(listener.fileno())
        command = subprocess.Popen(
            [sys.executable, "-I", "-S", str(LAUNCHER), str(fd), packed],
            pass_fds=(fd,),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        os.close(fd)
    with command:
        assert command.stdout is not None
        assert command.stdin is not None
        assert command.stdout.readline() == "before\n"
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        with socket.socket() as caller, pytest.raises(ConnectionRefusedError):
            caller.connect(("127.0.0.1", port))  # nothing looks like a server that is not there
        command.stdin.write("go on\n")
        command.stdin.flush()
        assert command.stdout.readline() == "listening\n"
        with socket.create_connection(("127.0.0.1", port), timeout=10):
            command.stdin.close()
