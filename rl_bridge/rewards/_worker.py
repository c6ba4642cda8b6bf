"""The worker process that evaluates reward functions, and the protocol between it and its pool.

python -m rl_bridge.rewards._worker FD FUNCTION...

FD is a connected socket. Both sides send length-prefixed frames. The worker's first one reports whether the functions
could be imported.
"""

import json
import os
import pickle
import socket
import struct
import sys
import traceback
from dataclasses import asdict, dataclass

from rl_bridge.errors import ConfigError, RewardError
from rl_bridge.rewards.function import RewardFunction, check_reward, load_function

TRACEBACK_CHARACTERS = 4000
LENGTH = struct.Struct(">I")
STARTED = b""
"""The worker's frame before it calls a function. If the process dies, it tells whether the evaluation had begun."""


@dataclass(kw_only=True, slots=True, frozen=True)
class RewardReply:
    """The result of an evaluation, or of a worker's start.

    Attributes:
        reward: The reward, or None.
        error: Why the evaluation or the start failed; empty if it did not.
        pid: The worker's process id.
    """

    reward: float | None = None
    error: str = ""
    pid: int = 0

    def encode(self) -> bytes:
        """Encode as a frame's content: not pickle, as the reader must not run the function's code."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> "RewardReply":
        """Decode the content of a worker's frame."""
        return cls(**json.loads(data))


def main(fd: int, paths: list[str]) -> None:
    """Answer requests until the pool closes the connection."""
    os.set_inheritable(fd, False)  # processes that a function starts must not keep the connection open
    with socket.socket(fileno=fd) as connection:
        try:
            functions = [load_function(path) for path in paths]
        except ConfigError as error:
            _send(connection, RewardReply(error=str(error), pid=os.getpid()).encode())
            return
        _send(connection, RewardReply(pid=os.getpid()).encode())
        while (content := _receive(connection)) is not None:
            _send(connection, STARTED)
            _send(connection, _evaluate(paths, functions, content).encode())


def _evaluate(paths: list[str], functions: list[RewardFunction], content: bytes) -> RewardReply:
    """Call a function and return its reward or error."""
    path = ", ".join(paths)
    try:
        function, prompt, response, target = pickle.loads(content)
        path = paths[function]
        return RewardReply(reward=check_reward(path, functions[function](prompt, response, target)))
    except RewardError as error:
        return RewardReply(error=str(error))
    except (Exception, SystemExit):
        return RewardReply(error=f"{path!r} raised:\n{traceback.format_exc()[-TRACEBACK_CHARACTERS:]}")


def _send(connection: socket.socket, content: bytes) -> None:
    connection.sendall(LENGTH.pack(len(content)) + content)


def _receive(connection: socket.socket) -> bytes | None:
    """Return the next frame's content, or None if the pool has closed the connection."""
    head = _receive_exactly(connection, LENGTH.size)
    return None if head is None else _receive_exactly(connection, LENGTH.unpack(head)[0])


def _receive_exactly(connection: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        chunk = connection.recv(min(size - len(data), 1 << 20))
        if not chunk:
            return None
        data += chunk
    return bytes(data)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
