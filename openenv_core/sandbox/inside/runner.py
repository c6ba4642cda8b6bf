"""The loop of one interpreter: a request comes, code runs, an answer goes.

It shares its process with the code that it runs, so nothing that it says is trusted outside. Between two requests
the supervisor stops the whole process: threads that code leaves behind do not run on.
"""

import io
import os
import resource
import socket
import sys
from typing import Any

from openenv_core.sandbox.inside import frames
from openenv_core.sandbox.inside.cells import Cells, describe
from openenv_core.sandbox.inside.display import Shown
from openenv_core.sandbox.inside.interrupts import Interrupts
from openenv_core.sandbox.values import decode, dumps


class Runner:
    """Serves one control socket.

    Args:
        control: To the supervisor.
        outputs_bytes: Of the result and the displayed bundles of one execution together.
    """

    def __init__(self, control: socket.socket, outputs_bytes: int) -> None:
        self.control = control
        self._outputs_bytes = outputs_bytes
        self._cells = Cells()
        self._interrupts = Interrupts()

    @property
    def namespace(self) -> dict[str, Any]:
        """The variables of the code."""
        return self._cells.namespace

    def heed(self) -> None:
        """Take interrupts from now on."""
        self._interrupts.heed()

    def serve(self) -> None:
        """Answer until the supervisor is gone."""
        self._open_streams()
        self._cells.install()
        while True:
            self.turn()

    def turn(self) -> None:
        """Answer one request."""
        try:
            request = frames.receive_request(self.control)
        except (EOFError, OSError):
            os._exit(0)
        self.control.sendall(self.answer(request))

    def answer(self, request: dict[str, Any]) -> bytes:
        """Do what one message asks for, and return the answer's bytes."""
        answer: dict[str, Any] = {"id": request["id"], "status": "ok", "exit_code": 0}
        texts: list[str] = []
        shown = Shown(self._outputs_bytes)
        try:
            try:
                self._streams_again(request.get("stdin"))
                self._interrupts.begin()
                self._run(request, answer, texts, shown)
            finally:
                self._interrupts.end()
        except BaseException as error:  # interrupted after the code, and before that was told
            self._interrupts.end()
            answer.update(status="error", exit_code=1, error=describe(error))
        answer["text"] = bool(texts)
        answer["outputs"] = []
        for kind, data in shown.bundles:
            answer["outputs"].append([kind, list(data)])
            texts += data.values()
        answer.update(
            truncated=shown.truncated,
            count=self._cells.count,
            max_rss=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        )
        return frames.pack_answer(answer, texts)

    def _run(self, request: dict[str, Any], answer: dict[str, Any], texts: list[str], shown: Shown) -> None:
        try:
            if request["op"] == "call":
                value = self._cells.call(request["name"], decode(request["args"]), decode(request["kwargs"]))
                texts.append(dumps(value, max_bytes=frames.MAX_VALUE).decode())
            elif (result := self._cells.run(request["code"], shown)) is not None:
                texts.append(result)
        except SystemExit as error:
            self._exited(answer, error)
        except MemoryError as error:
            answer.update(status="memory", exit_code=1, error=describe(error))
        except BaseException as error:
            answer.update(status="error", exit_code=1, error=describe(error))
        self.flush()

    def _exited(self, answer: dict[str, Any], error: SystemExit) -> None:
        code = error.code
        if code is None or code == 0:
            return
        number = code if type(code) is int else 1
        answer.update(status="error", exit_code=number & 0xFF or 1, error=describe(error))

    def _open_streams(self) -> None:
        sys.stdout = _writer(1)
        sys.stderr = _writer(2)

    def _streams_again(self, stdin: str | None) -> None:
        # Code may have closed them, or put something of its own in their place that is closed by now.
        if getattr(sys.stdout, "closed", True):
            sys.stdout = _writer(1)
        if getattr(sys.stderr, "closed", True):
            sys.stderr = _writer(2)
        sys.stdin = _reader(stdin or "")

    def flush(self) -> None:
        """Write out what is buffered."""
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except BaseException:  # it is whatever code has put there
                continue


def _writer(descriptor: int) -> io.TextIOWrapper:
    return open(descriptor, "w", encoding="utf-8", errors="backslashreplace", closefd=False)


def _reader(text: str) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(text.encode("utf-8", "replace")), encoding="utf-8")
