"""An interpreter's request loop: runs requests one at a time, in place or each in a fork; interruptible."""

import contextlib
import io
import os
import random
import resource
import socket
import sys
import tempfile
from typing import Any, Final

from openenv_core.sandbox.inside import frames
from openenv_core.sandbox.inside.agent import Agent
from openenv_core.sandbox.inside.cells import Cells, ShownBundles, describe
from openenv_core.sandbox.inside.interpreter import Interrupts, move_descriptors
from openenv_core.sandbox.values import decode, dumps


class RequestRunner:
    """Serves requests from one control socket."""

    def __init__(self, control: socket.socket, outputs_bytes: int) -> None:
        self.control = control
        self._outputs_bytes = outputs_bytes
        self.cells = Cells()
        self.interrupts = Interrupts()

    def serve(self) -> None:
        """Serve requests until the supervisor is gone."""
        sys.stdout, sys.stderr = _writer(1), _writer(2)
        self.cells.install()
        while True:
            self.serve_request()

    def serve_request(self) -> None:
        """Serve one request; exit if the supervisor is gone."""
        try:
            request, descriptors = frames.receive_request(self.control)
        except (EOFError, OSError):
            os._exit(0)
        if request["op"] == "serve":
            (channel,) = descriptors
            home, host = os.getcwd(), self.control
            Agent(channel, channel, home, sessions=False, host=host, furnish=furnish).serve()
        self.execute(request, descriptors)

    def execute(self, request: dict[str, Any], descriptors: list[int]) -> None:
        """Execute a request, and send the answer."""
        self.control.sendall(self.answer(request))

    def answer(self, request: dict[str, Any]) -> bytes:
        """Execute one request, and return its answer's bytes."""
        answer = {"id": request["id"], "status": "ok", "exit_code": 0}
        texts: list[str] = []
        bundles = ShownBundles(self._outputs_bytes)
        try:
            try:
                self._reset_streams(request.get("stdin"))
                self.interrupts.begin()
                self._run(request, answer, texts, bundles)
            finally:
                self.interrupts.end()
        except BaseException as error:  # interrupted after the code ended, before `end` was called
            self.interrupts.end()
            answer.update(status="error", exit_code=1, error=describe(error))
        answer["text"] = bool(texts)
        for _, data in bundles.bundles:
            texts += data.values()
        answer.update(
            outputs=[[kind, list(data)] for kind, data in bundles.bundles],
            truncated=bundles.truncated,
            count=self.cells.count,
            max_rss=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        )
        return frames.pack_answer(answer, texts)

    def _run(
        self, request: dict[str, Any], answer: dict[str, Any], texts: list[str], bundles: ShownBundles
    ) -> None:
        try:
            if request["op"] == "call":
                value = self.cells.call(request["name"], decode(request["args"]), decode(request["kwargs"]))
                texts.append(dumps(value, max_bytes=frames.MAX_VALUE).decode())
            elif (result := self.cells.run(request["code"], bundles)) is not None:
                texts.append(result)
        except SystemExit as error:
            if (code := error.code) is not None and code != 0:
                number = code if type(code) is int else 1
                answer.update(status="error", exit_code=number & 0xFF or 1, error=describe(error))
        except BaseException as error:
            status = "memory" if isinstance(error, MemoryError) else "error"
            answer.update(status=status, exit_code=1, error=describe(error))
        self.flush()

    def _reset_streams(self, stdin: str | None) -> None:
        # Code may have closed them, or replaced them by objects that are closed by now.
        for descriptor, name in ((1, "stdout"), (2, "stderr")):
            if getattr(getattr(sys, name, None), "closed", True):
                setattr(sys, name, _writer(descriptor))
        stdin_buffer = io.BytesIO((stdin or "").encode("utf-8", "replace"))
        sys.stdin = io.TextIOWrapper(stdin_buffer, encoding="utf-8")

    def flush(self) -> None:
        """Flush stdout and stderr."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(BaseException):  # code may have replaced the stream
                stream.flush()


def _writer(descriptor: int) -> io.TextIOWrapper:
    return open(descriptor, "w", encoding="utf-8", errors="backslashreplace", closefd=False)


CONTROL: Final = 3
"""The descriptor of the control socket; everything above it is closed."""


def arrange(control: int, stdout: int, stderr: int) -> socket.socket:
    """Move descriptors to the numbers that the interpreter expects; return the control socket."""
    move_descriptors([stdout, stderr, control], first=1)
    return socket.socket(fileno=CONTROL)


def furnish(workdir: str) -> None:
    """Make a folder the working folder of code."""
    os.chdir(workdir)
    temporary = os.path.join(workdir, ".tmp")
    with contextlib.suppress(FileExistsError):
        os.mkdir(temporary, 0o700)
    tempfile.tempdir = None
    # One by one: update() runs more of Python's code, and each page that it writes to is copied for the session.
    os.environ["HOME"] = os.environ["PWD"] = workdir
    os.environ["TMPDIR"] = os.environ["MPLCONFIGDIR"] = temporary


_DONE = b"d"


class BranchingRunner(RequestRunner):
    """Serves requests from one control socket, each in a fork that takes over from its parent."""

    def __init__(self, control: socket.socket, outputs_bytes: int) -> None:
        super().__init__(control, outputs_bytes)
        self._branches: list[int] = []
        # While a request runs here: the pipe to the process with the state before it.
        self._done: int | None = None
        os.register_at_fork(after_in_child=self._close_done)

    def execute(self, request: dict[str, Any], descriptors: list[int]) -> None:
        """Execute a request in a fork, which takes over; or make branches."""
        self.flush()
        if request["op"] == "branch":
            self._branch(request, descriptors)
        else:
            self._run_in_fork(request)

    def _run_in_fork(self, request: dict[str, Any]) -> None:
        done, done_writer = os.pipe()
        # Python reseeds in every fork, which would undo the code's own seed.
        randomness = random.getstate()
        process = os.fork()
        if process == 0:
            os.close(done)
            random.setstate(randomness)
            self.interrupts.reset()
            self._done = done_writer
            self.control.sendall(frames.FORK_NOTICE)
            answer = self.answer(request)
            if self._done is not None:
                os.write(self._done, _DONE)
            self._close_done()
            self.control.sendall(answer)
            return
        os.close(done_writer)
        was_handed_over = os.read(done, 1) == _DONE
        os.close(done)
        if was_handed_over:
            os._exit(0)
        ended = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        exit_code = 128 - ended if ended < 0 else ended
        rolled_back = {"id": request["id"], "status": "rolled_back", "exit_code": exit_code}
        self.control.sendall(frames.pack_answer(rolled_back, []))

    def _close_done(self) -> None:
        """Close the pipe; a process that the code forks, and which held it open, would hide the end of this one."""
        if self._done is not None:
            os.close(self._done)
            self._done = None

    def _branch(self, request: dict[str, Any], descriptors: list[int]) -> None:
        # Branches that have ended count towards the session's processes until they are waited for.
        self._branches = [process for process in self._branches if _runs(process)]
        randomness = random.getstate()
        # If the code has too many descriptors open, some are not received, and those branches are not made.
        for folder, *own in zip(
            request["folders"], descriptors[::3], descriptors[1::3], descriptors[2::3], strict=False
        ):
            try:
                process = os.fork()
            except OSError:
                break
            if process == 0:
                for descriptor in set(descriptors).difference(own):
                    os.close(descriptor)
                self._branches = []
                random.setstate(randomness)
                self.control.detach()
                self.control = arrange(*own)
                furnish(folder)
                sys.stdin = None
                self.control.send(frames.READY_NOTICE)
                return
            self._branches.append(process)
        for descriptor in descriptors:
            os.close(descriptor)
        self.control.sendall(frames.pack_answer({"id": request["id"], "status": "ok", "exit_code": 0}, []))


def _runs(process: int) -> bool:
    """Return whether a child is still running; False for a child of an earlier head."""
    try:
        return os.waitpid(process, os.WNOHANG)[0] == 0
    except ChildProcessError:
        return False
