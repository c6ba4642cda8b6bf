"""Evaluates reward functions in a process of its own, and what a pool and its workers say to each other.

python -m rl_bridge.rewards._worker FD FUNCTION...

FD is a connected socket. Both sides send frames of a length and so many bytes. The first one tells that the functions
are there, or why not.
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
"""What a worker says before it calls a function: whether a process that died had begun decides whose loss it is."""


@dataclass(kw_only=True, slots=True, frozen=True)
class RewardReply:
    """The result of an evaluation, or of a worker's start.

    Attributes:
        reward: The number, or None.
        error: Why there is neither; empty where there is.
        pid: The worker's.
    """

    reward: float | None = None
    error: str = ""
    pid: int = 0

    def encode(self) -> bytes:
        """The frame's content. It is read by a process that does not run code of the function's: no pickle."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> "RewardReply":
        """Of a frame that a worker sent."""
        return cls(**json.loads(data))


def main(fd: int, paths: list[str]) -> None:
    """Answer requests until the pool closes the connection."""
    os.set_inheritable(fd, False)  # what a function starts shall not keep the connection open
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
    """Call a function, and put what comes of it into words."""
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
    """The next frame's content; None where the pool has closed."""
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
