"""Evaluates reward functions in a process of its own.

python -m rl_bridge.rewards._worker FD FUNCTION...

FD is a connected socket. The first frame tells that the functions are there, or why not.
"""

import os
import socket
import sys
import traceback

from rl_bridge.errors import RewardError
from rl_bridge.rewards.function import RewardFunction, checked_reward, load_function
from rl_bridge.rewards.wire import BEGUN, RewardReply, RewardRequest, receive, send

TRACEBACK_CHARACTERS = 4000


def main(fd: int, paths: list[str]) -> None:
    """Answer requests until the pool has no more."""
    os.set_inheritable(fd, False)  # what a function starts shall not keep the connection open
    with socket.socket(fileno=fd) as connection:
        try:
            functions = [load_function(path) for path in paths]
        except RewardError as error:
            send(connection, RewardReply(error=str(error), pid=os.getpid()).encode())
            return
        send(connection, RewardReply(pid=os.getpid()).encode())
        while (content := receive(connection)) is not None:
            send(connection, BEGUN)
            send(connection, evaluate(paths, functions, content).encode())


def evaluate(paths: list[str], functions: list[RewardFunction], content: bytes) -> RewardReply:
    """Call a function, and put what comes of it into words."""
    path = ", ".join(paths)
    try:
        request = RewardRequest.decode(content)
        path = paths[request.function]
        value = functions[request.function](request.prompt, request.response, request.target)
        return RewardReply(reward=checked_reward(path, value))
    except RewardError as error:
        return RewardReply(error=str(error))
    except (Exception, SystemExit):
        return RewardReply(error=f"{path!r} raised:\n{traceback.format_exc()[-TRACEBACK_CHARACTERS:]}")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
