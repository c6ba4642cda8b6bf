"""An interpreter whose every execution is a fork of the state before it: that state outlives a kill, and can branch.

The process that waits is the *head*. Whoever runs a request announces itself, becomes the head once it is done, and
the old one ends; if it dies on the way, the old one goes on, and says so.
"""

import os
import random
import socket
import sys
from typing import Any

from openenv_core.sandbox.inside import frames
from openenv_core.sandbox.inside.places import CONTROL, arrange, furnish
from openenv_core.sandbox.inside.runner import Runner

_DONE = b"d"


class BranchingRunner(Runner):
    """Serves one control socket, and hands over to copies of itself."""

    def turn(self) -> None:
        """Answer one request, in a fork."""
        came: list[int] = []
        try:
            request = frames.receive_request(self.control, came)
        except (EOFError, OSError):
            os._exit(0)
        self.flush()
        if request["op"] == "branch":
            self._branch(request, came)
        else:
            self._run_apart(request)

    def _run_apart(self, request: dict[str, Any]) -> None:
        done, tell = os.pipe()
        # Python seeds anew in every fork, which would undo what the code has seeded.
        randomness = random.getstate()
        process = os.fork()
        if process == 0:
            os.close(done)
            random.setstate(randomness)
            self._interrupts.forget()
            self.control.sendall(frames.HERE)
            answer = self.answer(request)
            os.write(tell, _DONE)
            os.close(tell)
            self.control.sendall(answer)
            return
        os.close(tell)
        handed_over = os.read(done, 1) == _DONE
        os.close(done)
        if handed_over:
            os._exit(0)
        _, status = os.waitpid(process, 0)
        ended = os.waitstatus_to_exitcode(status)
        self.control.sendall(
            frames.pack_answer(
                {
                    "id": request["id"],
                    "status": "rolled_back",
                    "exit_code": 128 - ended if ended < 0 else ended,
                    "text": False,
                    "outputs": [],
                    "truncated": False,
                    "count": 0,
                    "max_rss": 0,
                },
                [],
            )
        )

    def _branch(self, request: dict[str, Any], came: list[int]) -> None:
        randomness = random.getstate()
        if os.fork() == 0:
            random.setstate(randomness)
            self.control.detach()
            arrange(*came)
            self.control = socket.socket(fileno=CONTROL)
            furnish(request["folder"])
            sys.stdin = None
            self.control.send(frames.READY)
            return
        for descriptor in came:
            os.close(descriptor)
        self.control.sendall(self.answer({"id": request["id"], "op": "execute", "code": ""}))
