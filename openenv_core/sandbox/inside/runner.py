"""An interpreter that serves requests, one after the other or each in a fork of its own, and may be interrupted."""

import contextlib
import fcntl
import io
import os
import random
import resource
import signal
import socket
import sys
import tempfile
from typing import Any, Final

from openenv_core.sandbox.inside import frames
from openenv_core.sandbox.inside.agent import Agent
from openenv_core.sandbox.inside.cells import Cells, ShownBundles, describe
from openenv_core.sandbox.values import decode, dumps

# Kept here because code may replace them in their own module.
_install = signal.signal
_installed = signal.getsignal
_raise = signal.raise_signal


class Interrupts:
    """What SIGINT does, between requests and while one runs.

    A handler that code has installed is its own while it runs, and only then: between two requests, where nothing would
    catch what it raises, this one takes its place.
    """

    def __init__(self) -> None:
        self._ours = self._interrupted
        self._theirs: Any = None
        self._handlers_installed = False
        self._runs = False
        self._missed = False

    def install(self) -> None:
        """Install the handlers."""
        _install(signal.SIGINT, self._ours)
        _install(frames.REPEAT_SIGNAL, self._repeated)
        self._handlers_installed = True

    def reset(self) -> None:
        """In a fork, which gets its own: what the head has missed is none of its business."""
        self._missed = False

    def begin(self) -> None:
        """From now on code runs. Its handler comes first: ours would raise, and the code's be lost with that."""
        if self._theirs is not None:
            _install(signal.SIGINT, self._theirs)
            self._theirs = None
        self._runs = True

    def end(self) -> None:
        """It does no more. Idempotent, as the code's handler may raise out of here."""
        self._runs = False
        if self._handlers_installed and (handler := _installed(signal.SIGINT)) is not self._ours:
            self._theirs = handler
            _install(signal.SIGINT, self._ours)

    def _interrupted(self, *_: object) -> None:
        self._missed = not self._runs
        if self._runs:
            raise KeyboardInterrupt

    def _repeated(self, *_: object) -> None:
        if self._runs and self._missed:
            self._missed = False
            _raise(signal.SIGINT)


class RequestRunner:
    """Serves one control socket."""

    def __init__(self, control: socket.socket, outputs_bytes: int) -> None:
        self.control = control
        self._outputs_bytes = outputs_bytes
        self.cells = Cells()
        self.interrupts = Interrupts()

    def serve(self) -> None:
        """Answer until the supervisor is gone."""
        sys.stdout, sys.stderr = _writer(1), _writer(2)
        self.cells.install()
        while True:
            self.serve_request()

    def serve_request(self) -> None:
        """Answer one request."""
        descriptors: list[int] = []
        try:
            request = frames.receive_request(self.control, descriptors)
        except (EOFError, OSError):
            os._exit(0)
        if request["op"] == "serve":
            agent = Agent(
                descriptors[0],
                descriptors[0],
                os.getcwd(),
                sessions=False,
                host=self.control,
                furnish=furnish,
            )
            agent.serve()
        self.execute(request, descriptors)

    def execute(self, request: dict[str, Any], descriptors: list[int]) -> None:
        """Execute a request, and answer it."""
        self.control.sendall(self.answer(request))

    def answer(self, request: dict[str, Any]) -> bytes:
        """Do what one message asks for, and return the answer's bytes."""
        answer = _empty_answer(request)
        texts: list[str] = []
        bundles = ShownBundles(self._outputs_bytes)
        try:
            try:
                self._reset_streams(request.get("stdin"))
                self.interrupts.begin()
                self._run(request, answer, texts, bundles)
            finally:
                self.interrupts.end()
        except BaseException as error:  # interrupted after the code, and before that was told
            self.interrupts.end()
            answer.update(status="error", exit_code=1, error=describe(error))
        answer["text"] = bool(texts)
        for kind, data in bundles.bundles:
            answer["outputs"].append([kind, list(data)])
            texts += data.values()
        answer.update(
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
        except MemoryError as error:
            answer.update(status="memory", exit_code=1, error=describe(error))
        except BaseException as error:
            answer.update(status="error", exit_code=1, error=describe(error))
        self.flush()

    def _reset_streams(self, stdin: str | None) -> None:
        # Code may have closed them, or put something of its own in their place that is closed by now.
        if getattr(sys.stdout, "closed", True):
            sys.stdout = _writer(1)
        if getattr(sys.stderr, "closed", True):
            sys.stderr = _writer(2)
        stdin_buffer = io.BytesIO((stdin or "").encode("utf-8", "replace"))
        sys.stdin = io.TextIOWrapper(stdin_buffer, encoding="utf-8")

    def flush(self) -> None:
        """Write out what is buffered."""
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except BaseException:  # it is whatever code has put there
                continue


def _empty_answer(request: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": request["id"],
        "status": "ok",
        "exit_code": 0,
        "text": False,
        "outputs": [],
        "truncated": False,
        "count": 0,
        "max_rss": 0,
    }


def _writer(descriptor: int) -> io.TextIOWrapper:
    return open(descriptor, "w", encoding="utf-8", errors="backslashreplace", closefd=False)


CONTROL: Final = 3
"""The descriptor of the control socket; everything above it is closed."""

_FIRST_FREE_DESCRIPTOR: Final = 16


def arrange(control: int, stdout: int, stderr: int) -> None:
    """Put descriptors where the interpreter expects them."""
    # First out of the way of each other, then to their places.
    moved = [
        fcntl.fcntl(descriptor, fcntl.F_DUPFD, _FIRST_FREE_DESCRIPTOR)
        for descriptor in (stdout, stderr, control)
    ]
    for descriptor in {stdout, stderr, control} - {1, 2, CONTROL}:
        os.close(descriptor)
    for descriptor, place in zip(moved, (1, 2, CONTROL), strict=True):
        os.dup2(descriptor, place, inheritable=place != CONTROL)
        os.close(descriptor)


def furnish(workdir: str) -> None:
    """Make a folder the place where code reads and writes."""
    os.chdir(workdir)
    temporary = os.path.join(workdir, ".tmp")
    with contextlib.suppress(FileExistsError):
        os.mkdir(temporary, 0o700)
    tempfile.tempdir = None
    # One by one: update() goes through much more of Python, and every page that it touches is copied for the session.
    os.environ["HOME"] = os.environ["PWD"] = workdir
    os.environ["TMPDIR"] = os.environ["MPLCONFIGDIR"] = temporary


_DONE = b"d"


class BranchingRunner(RequestRunner):
    """Serves one control socket, and hands over to copies of itself."""

    def __init__(self, control: socket.socket, outputs_bytes: int) -> None:
        super().__init__(control, outputs_bytes)
        self._branches: list[int] = []

    def execute(self, request: dict[str, Any], descriptors: list[int]) -> None:
        """Do so in a fork."""
        self.flush()
        if request["op"] == "branch":
            self._branch(request, descriptors)
        else:
            self._run_in_fork(request)

    def _run_in_fork(self, request: dict[str, Any]) -> None:
        done, done_writer = os.pipe()
        # Python seeds anew in every fork, which would undo what the code has seeded.
        randomness = random.getstate()
        process = os.fork()
        if process == 0:
            os.close(done)
            random.setstate(randomness)
            self.interrupts.reset()
            self.control.sendall(frames.FORK_NOTICE)
            answer = self.answer(request)
            os.write(done_writer, _DONE)
            os.close(done_writer)
            self.control.sendall(answer)
            return
        os.close(done_writer)
        was_handed_over = os.read(done, 1) == _DONE
        os.close(done)
        if was_handed_over:
            os._exit(0)
        _, status = os.waitpid(process, 0)
        ended = os.waitstatus_to_exitcode(status)
        exit_code = 128 - ended if ended < 0 else ended
        rolled_back = _empty_answer(request) | {"status": "rolled_back", "exit_code": exit_code}
        self.control.sendall(frames.pack_answer(rolled_back, []))

    def _branch(self, request: dict[str, Any], descriptors: list[int]) -> None:
        # Those that have ended count as processes of the session until they are waited for.
        self._branches = [process for process in self._branches if _runs(process)]
        randomness = random.getstate()
        # Fewer descriptors have come than were sent where the code has too many open; who gets none is not born.
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
                arrange(*own)
                self.control = socket.socket(fileno=CONTROL)
                furnish(folder)
                sys.stdin = None
                self.control.send(frames.READY_NOTICE)
                return
            self._branches.append(process)
        for descriptor in descriptors:
            os.close(descriptor)
        self.control.sendall(frames.pack_answer(_empty_answer(request), []))


def _runs(process: int) -> bool:
    """Return whether a child runs yet; one that the head before had is none."""
    try:
        return os.waitpid(process, os.WNOHANG)[0] == 0
    except ChildProcessError:
        return False
