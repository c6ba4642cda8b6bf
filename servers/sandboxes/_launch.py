"""Becomes a command that listens on a port which was held for it.

    python _launch.py FD WORDS

FD is a socket that listens on the port; WORDS is a list of words, in JSON and base64. The socket is closed, since
the command makes its own. In its place the port is held by a socket that only has the address: the system gives such
a port to nobody who asks for any, and lets it be had by whoever names it with SO_REUSEADDR, as servers do. Both have
the port for a moment (SO_REUSEPORT), so that nobody else gets it in between.
"""

import base64
import json
import os
import socket
import sys


def main(fd: int, words: list[str]) -> None:
    """Replace this process."""
    with socket.socket(fileno=fd) as listener:
        address = listener.getsockname()
        holder = socket.socket(listener.family, socket.SOCK_STREAM)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        for each in (listener, holder):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(address)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 0)
    holder.set_inheritable(True)
    port = str(address[1])
    command = [word.replace("{port}", port) for word in words]
    try:
        os.execvpe(command[0], command, {**os.environ, "PORT": port})
    except OSError as error:
        sys.exit(f"expected to run {command[0]!r}, got: {error}")


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(base64.urlsafe_b64decode(sys.argv[2])))
