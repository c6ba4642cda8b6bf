"""The agent: serves a whole sandbox from inside (commands, files, watched folders, code) in one thread.

It has one channel to the host. The host sends requests `{"id", "op", ...}`; a reply is `{"id", ...}`, with `error` and
`message` if the request is refused. Unsolicited frames name a `stream`: a command (`p` and a number), a context, a
watcher. Needs only the standard library, `cells.py` and `interpreter.py`, so that it also runs in containers, with
their own Python. The host must not trust any frame: the agent runs as the same user as the code.
"""

import contextlib
import datetime
import errno
import fcntl
import json
import os
import pwd
import selectors
import shutil
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple, NoReturn

from openenv_core.sandbox.inside.interpreter import (
    FILE_PIECE,
    MAX_DESCRIPTORS,
    REPEAT_SIGNAL,
    Furnish,
    interpret,
    pack,
    place_descriptors,
    receive,
)

PIECE: Final = 1 << 16
"""Maximum bytes of output per frame."""

WINDOW: Final = 1 << 20
"""Bytes of a stream that may be sent but not acknowledged; beyond that its pipes are not read."""

MAX_ENTRIES: Final = 4096
"""Maximum number of entries of a listing, and of a watched folder."""

_EVENTS: Final = 32
"""Maximum number of events per frame, because the host limits the size of headers."""

MAX_WATCHERS: Final = 32
WATCH_INTERVAL_S: Final = 0.1
INTERRUPT_GRACE_S: Final = 1.0
FORK_TIMEOUT_S: Final = 5.0
"""Seconds for an idle interpreter to fork."""

FORKED: Final = b"I"
"""Sent by a copy of the agent to the host, once it serves."""

ALIAS: Final = "/home/user"
"""Path by which clients refer to the home folder, wherever it is."""

_CODES: Final = {
    errno.ENOENT: "not_found",
    errno.ESRCH: "not_found",
    errno.EEXIST: "already_exists",
    errno.EACCES: "permission_denied",
    errno.EPERM: "permission_denied",
    errno.ENOSPC: "resource_exhausted",
    errno.EDQUOT: "resource_exhausted",
    errno.EFBIG: "resource_exhausted",
    errno.EAGAIN: "resource_exhausted",
    errno.EMFILE: "resource_exhausted",
}
_KINDS: Final = {stat.S_IFREG: "FILE", stat.S_IFDIR: "DIRECTORY", stat.S_IFLNK: "SYMLINK"}


class _RefusedError(Exception):
    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class _Pipes:
    """The output of a command or context, read as long as the client keeps up."""

    def __init__(self, agent: "Agent", stream: str, pipes: dict[int, str]) -> None:
        self._agent, self._stream, self._pipes = agent, stream, pipes
        self._uncredited = 0
        agent.pipes[stream] = self
        for descriptor in pipes:
            os.set_blocking(descriptor, False)
            agent.watch(descriptor, self._read)

    def acknowledge(self, size: int) -> None:
        """Note that the client has received some bytes."""
        before, self._uncredited = self._uncredited, max(0, self._uncredited - size)
        if before >= WINDOW > self._uncredited:
            for descriptor in self._pipes:
                self._agent.watch(descriptor, self._read)

    def close(self) -> None:
        """Stop reading and close the pipes."""
        self._agent.pipes.pop(self._stream, None)
        for descriptor in list(self._pipes):
            self._drop(descriptor)

    def drain(self) -> None:
        """Read the pipes' current content, which their capacity limits."""
        for descriptor in list(self._pipes):
            for _ in range(32):
                if not self._read(descriptor):
                    break

    def _read(self, descriptor: int) -> bool:
        try:
            data = os.read(descriptor, PIECE)
        except BlockingIOError:
            return False
        if not data:
            self._drop(descriptor)
            return False
        self._agent.send({"stream": self._stream, "pipe": self._pipes[descriptor]}, data)
        self._uncredited += len(data)
        if self._uncredited >= WINDOW:
            for each in self._pipes:
                self._agent.unwatch(each)
        return True

    def _drop(self, descriptor: int) -> None:
        self._agent.unwatch(descriptor)
        if self._pipes.pop(descriptor) == "data":
            self._agent.send({"stream": self._stream, "end": 0})
        os.close(descriptor)


class _Feed:
    """A buffered writer to a descriptor with a slow reader: a command's standard input, or a connection."""

    def __init__(self, agent: "Agent", descriptor: int) -> None:
        self._agent, self._descriptor = agent, descriptor
        self._unread = bytearray()
        self.closing = False
        os.set_blocking(descriptor, False)

    def write(self, data: bytes) -> None:
        if self.closing:
            raise _RefusedError("failed_precondition", "the standard input is closed")
        if len(self._unread) > WINDOW:
            raise _RefusedError("resource_exhausted", "expected it to read its input, which it does not")
        self._unread += data
        self._agent.watch(self._descriptor, self._flush, selectors.EVENT_WRITE)

    def close(self, *, at_once: bool = False) -> None:
        """Close the descriptor, after writing what is buffered. Idempotent."""
        self.closing = True
        if at_once:
            self._unread.clear()
        if not self._unread and self._descriptor >= 0:
            self._agent.unwatch(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    def _flush(self, descriptor: int) -> None:
        try:
            del self._unread[: os.write(descriptor, self._unread[:PIECE])]
        except BlockingIOError:
            return
        except OSError:
            self._unread.clear()  # the reader is gone
        if not self._unread:
            self._agent.unwatch(descriptor)
            if self.closing:
                self.close()


class _Command:
    """A running command."""

    def __init__(
        self, agent: "Agent", process: "subprocess.Popen[bytes]", stream: str, config: dict[str, Any]
    ) -> None:
        self.process, self.stream, self.config = process, stream, config
        self._agent = agent
        outputs = {_detach(process.stdout): "stdout", _detach(process.stderr): "stderr"}
        self.pipes = _Pipes(agent, stream, outputs)
        self.feed = None if process.stdin is None else _Feed(agent, _detach(process.stdin))

    def end(self, code: int) -> None:
        self.process.returncode = code
        self._agent.commands.remove(self)
        self.pipes.drain()
        self.pipes.close()
        if self.feed is not None:
            self.feed.close(at_once=True)
        status = f"signal: {signal.strsignal(-code)}".lower() if code < 0 else f"exit status {code}"
        self._agent.send({"stream": self.stream, "end": max(code, -1), "status": status})


def _detach(pipe: Any) -> int:
    """Return a descriptor of a file's own, and close the file."""
    with pipe:
        return os.dup(pipe.fileno())


class _Life(NamedTuple):
    """An interpreter's process and its connections."""

    process: int
    control: socket.socket
    stdout: int
    stderr: int


class _Context:
    """An interpreter in its own process, which runs cells one at a time."""

    def __init__(self, agent: "Agent", name: str, cwd: str, life: _Life | None = None) -> None:
        self._agent, self._name, self.cwd = agent, name, cwd
        self._kill_at: float | None = None
        self._running = False
        self._life: _Life | None = None
        self._begin(life)

    def run(self, code: str, envs: dict[str, str]) -> None:
        if self._running:
            raise _RefusedError("failed_precondition", "something runs in this context already")
        life = self._life or self._begin()
        self._running = True
        with contextlib.suppress(OSError):  # it has ended, which is reported like an end during the cell
            life.control.sendall(pack({"code": code, "envs": envs}))

    def interrupt(self) -> None:
        if self._running and self._kill_at is None:
            self._kill_at = time.monotonic() + INTERRUPT_GRACE_S
            self._signal(signal.SIGINT)

    def tick(self) -> None:
        """Repeat an interrupt; kill an interpreter that did not stop within the grace period."""
        if self._kill_at is not None:
            self._signal(signal.SIGKILL if time.monotonic() > self._kill_at else REPEAT_SIGNAL)

    def kill(self) -> None:
        """Kill the process, if there is one; the next cell gets another."""
        if self._life is None:
            return
        process, code = self._life.process, -signal.SIGKILL
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        if self._agent.children.pop(process, None) is not None:  # else a fork of another interpreter
            code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        self.on_exit(code)

    def fork(self, home: str, folder: str) -> int:
        """Fork the interpreter; return the copy's process id. The copy takes the next descriptors the host sends."""
        if self._running:
            raise _RefusedError("aborted", f"expected contexts that run nothing, got {self._name!r} running")
        control = (self._life or self._begin()).control
        control.settimeout(FORK_TIMEOUT_S)
        try:
            control.sendall(pack({"home": home, "folder": folder}))
            process = int(receive(control.recv)[0]["process"])
        except (OSError, EOFError, ValueError) as error:
            # It may still fork, and would then take the descriptors of the next fork.
            self.kill()
            text = f"expected {self._name!r} to fork, got {error!r}; it was restarted, its variables are gone"
            raise _RefusedError("internal", text) from None
        control.settimeout(None)
        return process

    def on_exit(self, code: int | None = None) -> None:
        """Report the end of the process to the running cell's client, if any, and close the connections to it."""
        if self._running:
            self.pipes.drain()
            status = "" if code is None else f" ({code})"
            value = f"the interpreter has ended{status}; its variables are gone"
            line = {"type": "error", "name": "InterpreterLost", "value": value, "traceback": value}
            self._agent.send({"stream": self._name, "line": True}, json.dumps(line).encode())
            self._done()
        if self._life is not None:
            self._agent.unwatch(self._life.control.fileno())
            self._life.control.close()
            self._life = None
            self.pipes.close()

    def _signal(self, number: signal.Signals) -> None:
        assert self._life is not None
        try:
            os.kill(self._life.process, number)
        except ProcessLookupError:  # not a child, which would exist until it is waited for
            self.on_exit()

    def _done(self) -> None:
        self._running, self._kill_at = False, None
        self._agent.send({"stream": self._name, "end": 0})

    def _begin(self, life: _Life | None = None) -> _Life:
        self._life = life = life or self._spawn()
        life.control.setblocking(True)
        self.pipes = _Pipes(self._agent, self._name, {life.stdout: "stdout", life.stderr: "stderr"})
        self._agent.watch(life.control.fileno(), self._on_answer)
        return life

    def _spawn(self) -> _Life:
        control, theirs = socket.socketpair()
        (stdout, to_stdout), (stderr, to_stderr) = os.pipe(), os.pipe()
        inner = [to_stdout, to_stderr, theirs.detach()]
        try:
            if (process := os.fork()) == 0:
                self._become_interpreter(inner)
        except OSError:
            for each in (control.detach(), stdout, stderr):
                os.close(each)
            raise
        finally:
            for each in inner:
                os.close(each)
        self._agent.children[process] = self.on_exit
        return _Life(process, control, stdout, stderr)

    def _become_interpreter(self, descriptors: list[int]) -> NoReturn:
        try:
            nothing = os.open(os.devnull, os.O_RDONLY)  # in a container, stdin is the host's channel
            host = [] if self._agent.host is None else [self._agent.host.fileno()]
            place_descriptors([nothing, *descriptors, *host])
            os.chdir(self.cwd)
            interpret(socket.socket(fileno=3), self._agent.furnish)
        finally:
            os._exit(1)

    def _on_answer(self, _: int) -> None:
        assert self._life is not None
        try:
            header, blob = receive(self._life.control.recv)
        except (OSError, EOFError, ValueError):
            # It has ended, or the code has closed or corrupted the channel: it cannot be used any more.
            self.kill()
            return
        self.pipes.drain()
        if "end" in header:
            self._done()
        else:
            self._agent.send({"stream": self._name, "line": True}, blob)


class _Watcher:
    """Watches a folder by polling; inotify is not allowed at every isolation level."""

    def __init__(self, agent: "Agent", name: str, path: str, recursive: bool, held: bool) -> None:
        self._agent, self._name, self._path, self._recursive = agent, name, path, recursive
        self._held_events: list[tuple[str, str]] | None = [] if held else None
        self._last_snapshot = self._snapshot()

    def take(self) -> list[tuple[str, str]]:
        """Return the events since the last call."""
        events, self._held_events = (self._held_events or []), []
        return events

    def tick(self) -> None:
        now, before = self._snapshot(), self._last_snapshot
        self._last_snapshot = now
        gone = {before[name][0]: name for name in before.keys() - now.keys()}
        events = []
        for name in sorted(now):
            if name not in before:
                if (old := gone.pop(now[name][0], None)) is not None:
                    events.append(("RENAME", old))
                events.append(("CREATE", name))
            elif now[name][1] != before[name][1]:
                events.append(("WRITE", name))
            elif now[name][2] != before[name][2]:
                events.append(("CHMOD", name))
        events += [("REMOVE", name) for name in sorted(gone.values())]
        if self._held_events is not None:
            self._held_events = [*self._held_events, *events][-MAX_ENTRIES:]
            return
        for begin in range(0, len(events), _EVENTS):
            self._agent.send({"stream": self._name, "events": events[begin : begin + _EVENTS]})

    def _snapshot(self) -> dict[str, tuple[int, tuple[int, int], int]]:
        entries = {}
        for path, status in _walk(self._path, 64 if self._recursive else 1):
            changed = (0, 0) if stat.S_ISDIR(status.st_mode) else (status.st_mtime_ns, status.st_size)
            entries[os.path.relpath(path, self._path)] = (status.st_ino, changed, status.st_mode)
        return entries


def _walk(path: str, depth: int) -> list[tuple[str, os.stat_result]]:
    """Return the entries below a folder up to a depth, sorted by path. Links are not followed."""
    entries: list[tuple[str, os.stat_result]] = []
    os.listdir(path)  # raises if it is not a folder
    for folder, folders, files in os.walk(path):
        for entry in (os.path.join(folder, name) for name in folders + files):
            with contextlib.suppress(OSError):
                entries.append((entry, os.lstat(entry)))
        if len(entries) > MAX_ENTRIES:
            raise _RefusedError(
                "resource_exhausted", f"there are more than {MAX_ENTRIES} entries below {path}"
            )
        if os.path.relpath(os.path.join(folder, "x"), path).count(os.sep) + 1 >= depth:
            folders.clear()
    return sorted(entries)


def _entry(path: str, info: os.stat_result) -> dict[str, Any]:
    when = datetime.datetime.fromtimestamp(info.st_mtime, datetime.UTC)
    entry = {
        "name": os.path.basename(path),
        "type": f"FILE_TYPE_{_KINDS.get(stat.S_IFMT(info.st_mode), 'UNSPECIFIED')}",
        "path": path,
        "size": str(info.st_size),
        "mode": stat.S_IMODE(info.st_mode),
        "permissions": stat.filemode(info.st_mode)[1:],
        "owner": _user(info.st_uid),
        "group": str(info.st_gid),
        "modifiedTime": when.isoformat().replace("+00:00", "Z"),
    }
    if stat.S_ISLNK(info.st_mode):
        entry["symlinkTarget"] = os.readlink(path)
    return entry


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OSError):
        return "user" if uid == os.getuid() else str(uid)


class Agent:
    """Serves the host's requests until the host is gone.

    Args:
        reads: The descriptor to read the host's frames from.
        writes: The descriptor to write frames to.
        home: The folder that relative paths are resolved against, and the default for commands.
        sessions: Whether commands get their own process sessions, so that signals reach all of their processes.
        host: The socket on which descriptors for forks arrive; None: the agent cannot fork.
        furnish: Makes a folder the working folder of code.
    """

    def __init__(
        self,
        reads: int,
        writes: int,
        home: str,
        *,
        sessions: bool,
        host: socket.socket | None = None,
        furnish: Furnish = os.chdir,
    ) -> None:
        self._reads, self._writes, self._home, self._sessions = reads, writes, home, sessions
        self.host, self.furnish = host, furnish
        self._clear()

    def _clear(self) -> None:
        self.pipes: dict[str, _Pipes] = {}
        self._selector = selectors.DefaultSelector()
        self.children: dict[int, Callable[[int], object]] = {}  # what to call with their exit codes
        self.commands: list[_Command] = []
        self._contexts: dict[str, _Context] = {}
        self._watchers: dict[str, _Watcher] = {}
        self._connections: dict[str, _Feed] = {}

    def serve(self) -> NoReturn:
        """Serve requests until the host is gone."""
        woken, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        os.set_blocking(self._reads, True)
        os.set_blocking(self._writes, True)
        self.watch(woken, self._reap)
        self.watch(self._reads, self._serve_one)
        self.send({"hello": True, "home": self._home, "user": _user(os.getuid())})
        while True:
            pending = self._watchers or self._contexts
            for key, _ in self._selector.select(WATCH_INTERVAL_S if pending else None):
                # An earlier handler may have closed it, and a new descriptor may have its number.
                if self._selector.get_map().get(key.fd) is key:
                    key.data(key.fd)
            for context in list(self._contexts.values()):
                context.tick()
            for name, watcher in list(self._watchers.items()):
                try:
                    watcher.tick()
                except (OSError, _RefusedError) as error:
                    del self._watchers[name]
                    self.send({"stream": name, "end": 1, "status": str(error)})

    def watch(self, descriptor: int, act: Callable[[int], Any], events: int = selectors.EVENT_READ) -> None:
        """Call a handler whenever a descriptor is ready."""
        with contextlib.suppress(KeyError):
            self._selector.register(descriptor, events, act)

    def unwatch(self, descriptor: int) -> None:
        """Stop watching a descriptor."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(descriptor)

    def send(self, header: dict[str, Any], blob: bytes = b"") -> None:
        """Send a frame; block until it is written."""
        left = memoryview(pack(header, blob))
        while left:
            left = left[os.write(self._writes, left) :]

    def _reap(self, woken: int) -> None:
        os.read(woken, 4096)
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if (on_exit := self.children.pop(ended[0], None)) is not None:
                    on_exit(os.waitstatus_to_exitcode(ended[1]))

    def _serve_one(self, _: int) -> None:
        try:
            header, blob = receive(lambda size: os.read(self._reads, size))
        except (EOFError, OSError):
            self._end()
        answer: dict[str, Any] = {"id": header.pop("id")}
        data = b""
        try:
            operation = getattr(self, f"_op_{header.pop('op')}")
            result = operation(**header, **({"blob": blob} if blob else {}))
            if isinstance(result, bytes):
                data = result
            elif result is not None:
                answer.update(result)
        except _RefusedError as error:
            answer.update(error=error.code, message=str(error))
        except OSError as error:
            text = f"{error.strerror}: {error.filename}" if error.filename else str(error.strerror)
            answer.update(error=_CODES.get(error.errno or 0, "invalid_argument"), message=text)
        except Exception as error:  # invalid arguments: a NUL in a path, or a number in place of one
            answer.update(error="invalid_argument", message=str(error))
        if answer["id"]:
            self.send(answer, data)

    def _end(self) -> NoReturn:
        # Other forks of the same sandbox may live on, so its processes do not all end with this one.
        for command in self.commands:
            command.process.kill()
        for context in self._contexts.values():
            with contextlib.suppress(OSError):  # its client cannot be told
                context.kill()
        os._exit(0)

    def _op_fork(self, folder: str, contexts: list[str]) -> None:
        """Fork the agent; the copy has the given contexts, its own folder and channel, and no commands."""
        if self.host is None:
            raise _RefusedError("unimplemented", "the sandbox cannot be forked")
        home = self._home

        def ignore_others(below: str, _: list[str]) -> list[str]:
            return [os.path.basename(os.environ["TMPDIR"])] if below == home else []

        descriptors: list[int] = []
        try:
            shutil.copytree(home, folder, symlinks=True, dirs_exist_ok=True, ignore=ignore_others)
            originals = [(name, self._contexts[name]) for name in contexts]
            copies = [(name, context.cwd, context.fork(home, folder)) for name, context in originals]
            descriptors = socket.recv_fds(self.host, 1, MAX_DESCRIPTORS)[1]
            if os.fork() == 0:
                self._serve_copy(folder, descriptors, copies)
        except shutil.Error as error:
            source, _, reason = error.args[0][0]
            readable = os.access(source, os.R_OK, follow_symlinks=False)
            code = "resource_exhausted" if readable else "permission_denied"
            raise _RefusedError(code, f"{source!r} was not copied: {reason}"[:1000]) from None
        finally:
            for each in descriptors or self._unused_descriptors():
                os.close(each)

    def _unused_descriptors(self) -> list[int]:
        """Return the descriptors received for a fork that has failed."""
        ports: list[int] = []
        assert self.host is not None
        self.host.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while more := socket.recv_fds(self.host, 1, MAX_DESCRIPTORS)[1]:
                ports += more
        self.host.setblocking(True)
        return ports

    def _serve_copy(
        self, folder: str, descriptors: list[int], contexts: list[tuple[str, str, int]]
    ) -> NoReturn:
        """In the copy: release the original's resources, and serve the copy's channel."""
        try:
            self._selector.close()  # garbage-collected later, it would close a reused descriptor number
            control, stdout, stderr, channel, *context_fds = [
                fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, 5) for each in descriptors
            ]
            nothing = os.open(os.devnull, os.O_RDONLY)
            place_descriptors([nothing, stdout, stderr, control, channel], context_fds)
            home, self._home = self._home, folder
            self._reads = self._writes = 4
            self._clear()
            self.furnish(folder)
            for (name, cwd, process), (control_fd, out, err) in zip(
                contexts, zip(*[iter(context_fds)] * 3, strict=True), strict=True
            ):
                if cwd == home or cwd.startswith(home + "/"):
                    cwd = folder + cwd[len(home) :]
                life = _Life(process, socket.socket(fileno=control_fd), out, err)
                self._contexts[name] = _Context(self, name, cwd, life)
            os.write(3, FORKED)
            self.serve()
        finally:
            os._exit(1)

    def _path(self, path: str) -> str:
        if path == "~" or path.startswith("~/"):
            path = self._home + path[1:]
        elif path == ALIAS or path.startswith(ALIAS + "/"):
            path = self._home + path[len(ALIAS) :]
        return os.path.normpath(os.path.join(self._home, path))

    def _op_setup(self, envs: dict[str, str]) -> None:
        os.environ.update(envs)

    # Commands

    def _op_start(self, stream: str, **config: Any) -> dict[str, Any]:
        cwd = self._path(config["cwd"])
        if not os.path.isdir(cwd):
            raise _RefusedError("invalid_argument", f"expected a folder to start in, got {cwd!r}")
        cmd = config["cmd"]
        if cmd == "/bin/bash" and not os.path.exists(cmd):
            cmd = "/bin/sh"
        process = subprocess.Popen(
            [cmd, *config["args"]],
            cwd=cwd,
            env={**os.environ, **config["envs"], "PWD": cwd},
            stdin=subprocess.PIPE if config["stdin"] else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=self._sessions,
        )
        command = _Command(self, process, stream, config)
        self.commands.append(command)
        self.children[process.pid] = command.end
        return {"pid": process.pid}

    def _op_commands(self) -> bytes:
        rows = [{"pid": command.process.pid, **command.config} for command in self.commands]
        return json.dumps(rows).encode()

    def _command(self, pid: int | None, stream: str | None = None) -> _Command:
        for command in self.commands:
            if pid == command.process.pid or stream == command.stream:
                return command
        raise _RefusedError("not_found", f"expected a running process, got {pid}")

    def _op_find(self, pid: int) -> dict[str, Any]:
        return {"name": self._command(pid).stream}

    def _op_input(self, pid: int, blob: bytes) -> None:
        if (feed := self._command(pid).feed) is None:
            raise _RefusedError("failed_precondition", "the command was started without stdin=True")
        feed.write(blob)

    def _op_close_stdin(self, pid: int) -> None:
        if (feed := self._command(pid).feed) is not None:
            feed.close()

    def _op_signal(self, signal: int, pid: int | None = None, stream: str | None = None) -> None:
        (os.killpg if self._sessions else os.kill)(self._command(pid, stream).process.pid, signal)

    def _op_acknowledge(self, stream: str, bytes: int) -> None:  # noqa: A002 - the frame's own name for it
        if (pipes := self.pipes.get(stream)) is not None:
            pipes.acknowledge(bytes)

    # Connections to servers inside

    def _op_connect(self, stream: str, port: int) -> None:
        connection = socket.create_connection(("127.0.0.1", port), timeout=5.0)
        self._connections[stream] = _Feed(self, os.dup(connection.fileno()))
        _Pipes(self, stream, {connection.detach(): "data"})

    def _op_send(self, stream: str, blob: bytes) -> None:
        self._connections[stream].write(blob)

    def _op_disconnect(self, stream: str) -> None:
        self._connections.pop(stream).close()
        if (pipes := self.pipes.get(stream)) is not None:
            pipes.close()

    # Files

    def _op_stat(self, path: str) -> dict[str, Any]:
        path = self._path(path)
        return {"entry": _entry(path, os.lstat(path))}

    def _op_list(self, path: str, depth: int) -> bytes:
        rows = [_entry(*each) for each in _walk(self._path(path), depth)]
        return json.dumps(rows).encode("utf-8", "replace")

    def _op_mkdir(self, path: str) -> dict[str, Any]:
        path = self._path(path)
        if os.path.exists(path):
            code = "already_exists" if os.path.isdir(path) else "invalid_argument"
            raise _RefusedError(code, f"{path} is there")
        os.makedirs(path)
        return self._op_stat(path)

    def _op_move(self, source: str, destination: str) -> dict[str, Any]:
        source, path = self._path(source), self._path(destination)
        os.lstat(source)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.rename(source, path)
        return self._op_stat(path)

    def _op_remove(self, path: str) -> None:
        path = self._path(path)
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        elif os.path.lexists(path):
            os.unlink(path)

    def _op_read(self, path: str, offset: int) -> bytes:
        with open(self._file(self._path(path), os.O_RDONLY), "rb") as file:
            file.seek(offset)
            return file.read(FILE_PIECE)

    def _op_write(self, path: str, offset: int, blob: bytes = b"") -> dict[str, Any]:
        path = self._path(path)
        if offset == 0:
            os.makedirs(os.path.dirname(path), exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if offset == 0 else 0)
        with open(self._file(path, flags), "wb") as file:
            file.seek(offset)
            file.write(blob)
        return {"entry": {"name": os.path.basename(path), "type": "file", "path": path}}

    def _file(self, path: str, flags: int) -> int:
        file = os.open(path, flags | os.O_NONBLOCK, 0o644)  # opening a named pipe would block
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise _RefusedError("invalid_argument", f"expected a plain file, got {path!r}")
        return file

    def _op_watch(self, name: str, path: str, recursive: bool, held: bool) -> None:
        if len(self._watchers) >= MAX_WATCHERS:
            raise _RefusedError(
                "resource_exhausted", f"there are {MAX_WATCHERS} watchers, the most allowed; stop one"
            )
        self._watchers[name] = _Watcher(self, name, self._path(path), recursive, held)

    def _op_events(self, name: str) -> bytes:
        if name not in self._watchers:
            raise _RefusedError("not_found", f"expected a watcher, got {name!r}")
        return json.dumps(self._watchers[name].take()).encode("utf-8", "replace")

    def _op_unwatch(self, name: str) -> None:
        self._watchers.pop(name, None)

    # Interpreters

    def _op_context(self, name: str, cwd: str) -> dict[str, Any]:
        cwd = self._path(cwd)
        os.makedirs(cwd, exist_ok=True)
        self._contexts[name] = _Context(self, name, cwd)
        return {"cwd": cwd}

    def _op_run(self, name: str, code: str, envs: dict[str, str]) -> None:
        self._contexts[name].run(code, envs)

    def _op_interrupt(self, name: str) -> None:
        self._contexts[name].interrupt()

    def _op_restart(self, name: str) -> None:
        self._contexts[name].kill()

    def _op_drop(self, name: str) -> None:
        self._contexts.pop(name).kill()
