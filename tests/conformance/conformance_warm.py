"""Starts the client under test repeatedly from one imported process: the suites start it 74 times.

conformance_warm.py SOCKET serves: it imports the client once, and forks for each run. conformance_warm.py SOCKET URL is
what a suite starts: it hands its variables and its output to a fork, and ends as that does.
"""

import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable


def launch(path: str, url: str) -> int:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        socket.send_fds(connection, [b"\n"], [1, 2])
        connection.sendall(json.dumps({"url": url, "environ": dict(os.environ)}).encode())
        connection.shutdown(socket.SHUT_WR)
        status = connection.recv(1)
        return status[0] if status else 1


def serve(path: str) -> None:
    import conformance_client

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.create_server(path, family=socket.AF_UNIX, backlog=128) as listener:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while True:
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                _run(conformance_client.run, connection)
            connection.close()


def _run(client: Callable[[str], None], connection: socket.socket) -> None:
    status = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _, outputs, _, _ = socket.recv_fds(connection, 1, 2)
        for number, output in enumerate(outputs, 1):
            os.dup2(output, number)
        with connection.makefile("rb") as file:
            asked = json.loads(file.read())
        os.environ.clear()
        os.environ.update(asked["environ"])
        client(asked["url"])
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        connection.sendall(bytes([status]))
        os._exit(status)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        serve(sys.argv[1])
    sys.exit(launch(sys.argv[1], sys.argv[2]))
