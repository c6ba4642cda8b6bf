"""Code that is sent as text into the session's own interpreter, for its workspace, files and standard input.

Standard library only, for Python 3.9 and newer; imports nothing of ours. The session's code can tamper with everything
that this uses, so its replies prove nothing. Each function takes one dictionary of arguments.
"""

import base64
import hashlib
import importlib
import io
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from typing import Any

PREFIX = "code-interpreter-"


def begin(request: dict[str, Any]) -> dict[str, Any]:
    """Create the workspace, import packages, and remove the workspaces of interpreters that died."""
    for folder in request["leftovers"]:
        if os.path.basename(folder).startswith(PREFIX):
            shutil.rmtree(folder, ignore_errors=True)
    if request["own_folder"]:
        os.chdir(tempfile.mkdtemp(prefix=PREFIX))
    failed = {}
    for name in request["packages"]:
        try:
            importlib.import_module(name)
        except Exception as error:
            failed[name] = repr(error)[:500]
    return {"root": os.path.realpath(os.getcwd()), "failed": failed}


def end(request: dict[str, Any]) -> dict[str, Any]:
    """Remove the workspace."""
    os.chdir("/")
    shutil.rmtree(request["root"], ignore_errors=True)
    return {}


def put(request: dict[str, Any]) -> dict[str, Any]:
    """Write a chunk of a file."""
    path = _within(request)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.exists(path) and not os.path.isfile(path):
        return {"refused": "there is something else of that name"}
    with open(path, "ab" if request["offset"] else "wb") as file:
        if file.tell() != request["offset"]:
            return {"refused": "it was changed while it was written"}
        file.write(base64.b64decode(request["data"]))
    return {}


def take(request: dict[str, Any]) -> dict[str, Any]:
    """Move an uploaded file to its path in the workspace."""
    path = _within(request)
    uploaded = os.path.join(request["root"], request["name"])
    if not os.path.isfile(uploaded):
        return {"missing": True}
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.exists(path) and not os.path.isfile(path):
        os.remove(uploaded)
        return {"refused": "there is something else of that name"}
    os.replace(uploaded, path)
    return {"sha256": _digest(path)}


def get(request: dict[str, Any]) -> dict[str, Any]:
    """Read a chunk of a file."""
    path = _within(request)
    if not os.path.isfile(path):
        return {"refused": "there is no plain file there"}
    size = os.path.getsize(path)
    if size > request["most"]:
        return {"refused": f"it is larger than {request['most']} bytes"}
    with open(path, "rb") as file:
        file.seek(request["offset"])
        return {"size": size, "data": base64.b64encode(file.read(request["piece"])).decode()}


def files(request: dict[str, Any]) -> dict[str, Any]:
    """List the regular files. Files with the known size and modification time are not hashed again."""
    root, known = request["root"], request["known"]
    rows: list[list[Any]] = []
    for folder, folders, names in os.walk(root):
        folders.sort()
        for name in sorted(names):
            path = os.path.join(folder, name)
            if os.path.islink(path) or not os.path.isfile(path):
                continue
            if len(rows) >= request["most_files"]:
                return {"files": rows, "more": True}
            place = os.path.relpath(path, root).replace(os.sep, "/")
            stat = os.stat(path)
            fresh = known.get(place) != [stat.st_size, stat.st_mtime_ns]
            digest = _digest(path) if fresh and stat.st_size <= request["most"] else ""
            rows.append([place, stat.st_size, stat.st_mtime_ns, digest])
    return {"files": rows, "more": False}


def stdin(request: dict[str, Any]) -> dict[str, Any]:
    """Make standard input and `input` read from a text."""
    source = io.StringIO(request["text"])
    sys.stdin = source

    def read_line(prompt: object = "", *_: object, **__: object) -> str:
        sys.stdout.write(str(prompt))
        line: str = source.readline()
        if not line:
            raise EOFError("EOF when reading a line")
        return line[:-1] if line.endswith("\n") else line

    import builtins

    builtins.input = read_line
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is not None and getattr(shell, "kernel", None) is not None:
        shell.kernel.raw_input = read_line  # otherwise an IPython kernel asks its frontend for input
    return {}


def _within(request: dict[str, Any]) -> str:
    root: str = request["root"]
    path = os.path.realpath(os.path.join(root, str(request["path"])))
    if not path.startswith(root.rstrip(os.sep) + os.sep):
        raise PermissionError("it leads out of the workspace")
    return path


def _digest(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for piece in iter(lambda: file.read(1 << 20), b""):
            digest.update(piece)
    return digest.hexdigest()


def answer(function: str, packed: str, marker: str) -> str:
    """Run a request, and return its reply between two markers."""
    functions: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
        each.__name__: each for each in (begin, end, put, take, get, files, stdin)
    }
    try:
        reply = functions[function](json.loads(base64.b64decode(packed)))
    except Exception as error:
        reply = {"refused": f"{type(error).__name__}: {str(error)[:500]}"}
    return marker + base64.b64encode(json.dumps(reply).encode()).decode() + marker
