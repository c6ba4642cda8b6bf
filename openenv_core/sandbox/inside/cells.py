"""Runs code cell by cell, and collects results and displayed values."""

import ast
import asyncio
import base64
import builtins
import contextlib
import inspect
import io
import linecache
import os
import sys
import traceback
from collections.abc import Callable, Coroutine
from types import CodeType, ModuleType
from typing import Any, Final

_METHODS: Final = (
    ("text/html", "_repr_html_"),
    ("text/markdown", "_repr_markdown_"),
    ("text/latex", "_repr_latex_"),
    ("image/svg+xml", "_repr_svg_"),
    ("image/png", "_repr_png_"),
    ("image/jpeg", "_repr_jpeg_"),
)
"""Methods by which notebooks ask an object for its representation in a mime type."""

_MAX_BUNDLES: Final = 256
"""Maximum number of bundles per execution."""


class ShownBundles:
    """The displayed bundles of one execution, limited in total size."""

    def __init__(self, limit: int) -> None:
        self._left = limit
        self.bundles: list[tuple[str, dict[str, str]]] = []
        self.truncated = False

    def text(self, text: str) -> str:
        """Return a text, truncated to what is left of the limit."""
        data = text.encode("utf-8", "replace")
        if len(data) > self._left:
            self.truncated = True
            data = data[: self._left]
            text = data.decode("utf-8", "ignore")
        self._left -= len(data)
        return text

    def add(self, kind: str, data: dict[str, str]) -> None:
        """Add a bundle; if it is too large, set `truncated` instead."""
        size = sum(len(value.encode("utf-8", "replace")) for value in data.values())
        if size > self._left or len(self.bundles) == _MAX_BUNDLES:
            self.truncated = True
            return
        self._left -= size
        self.bundles.append((kind, data))

    def display(self, *values: Any) -> None:
        """Display values; available to code as `display`."""
        for value in values:
            self.add("display_data", _bundle(value, repr(value)))


def _bundle(value: Any, text: str) -> dict[str, str]:
    """Return a value's representations in every mime type that its class offers, and as text."""
    data: dict[str, str] = {"text/plain": text}
    kind = type(value)
    if callable(make_bundle := getattr(kind, "_repr_mimebundle_", None)):
        representations = make_bundle(value)
        representations = representations[0] if isinstance(representations, tuple) else representations
        for mime, content in dict(representations or {}).items():
            if content is not None:
                data[str(mime)] = _plain(content)
        return data
    for mime, name in _METHODS:
        method: Callable[[Any], Any] | None = getattr(kind, name, None)
        if callable(method) and (content := method(value)) is not None:
            data[mime] = _plain(content)
    return data


def _plain(value: Any) -> str:
    if isinstance(value, bytes | bytearray):
        return base64.b64encode(value).decode("ascii")
    return value if type(value) is str else str(value)


BACKEND: Final = "ropewalk_figures"
"""The module name of the matplotlib backend."""


class FigureBackend(ModuleType):
    """A matplotlib backend with the Agg canvas: displays open figures on `show()`, and after an execution."""

    def __init__(self) -> None:
        super().__init__(BACKEND)
        self.shown: ShownBundles | None = None
        self.__dict__["show"] = self.show  # pyplot looks it up in the module's dictionary

    def __getattr__(self, name: str) -> Any:
        if name not in ("FigureCanvas", "FigureManager"):
            raise AttributeError(name)
        from matplotlib.backend_bases import FigureManagerBase
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        self.FigureCanvas = FigureCanvasAgg
        self.FigureManager = FigureManagerBase
        return self.__dict__[name]

    def show(self, *_: Any, **__: Any) -> None:
        """Display and close the open figures; called by `pyplot.show`."""
        pyplot = sys.modules.get("matplotlib.pyplot")
        if pyplot is None or self.shown is None:
            return
        try:
            for number in pyplot.get_fignums():
                figure = pyplot.figure(number)
                with io.BytesIO() as file:
                    figure.savefig(file, format="png", bbox_inches="tight")
                    image = base64.b64encode(file.getvalue()).decode("ascii")
                self.shown.add("display_data", {"image/png": image, "text/plain": repr(figure)})
        finally:
            pyplot.close("all")


_FLAGS: Final = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
_TRACEBACK_CHARS: Final = 20_000
_EVALUE_CHARS: Final = 10_000
_NAME_CHARS: Final = 200

# Traceback frames of files in this folder are not shown.
_OURS: Final = os.path.dirname(__file__) + os.sep


class Cells:
    """Runs cells and calls functions in one namespace."""

    def __init__(self) -> None:
        self.count = 0
        self._main = ModuleType("__main__")
        self.namespace: dict[str, Any] = self._main.__dict__
        self.namespace["__builtins__"] = builtins
        self._figures = FigureBackend()
        self._loop: asyncio.AbstractEventLoop | None = None

    def install(self) -> None:
        """Become the process's main module."""
        sys.modules["__main__"] = self._main
        sys.modules[BACKEND] = self._figures

    def run(self, code: str, shown: ShownBundles) -> str | None:
        """Run a cell; return the text of its last expression's value, if any."""
        self.count += 1
        name = f"<cell {self.count}>"
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
        self.namespace["display"] = shown.display
        self._figures.shown = shown
        body = compile(code, name, "exec", ast.PyCF_ONLY_AST | _FLAGS, dont_inherit=True)
        last: CodeType | None = None
        if body.body and isinstance(ending := body.body[-1], ast.Expr):
            body.body.pop()
            last = compile(ast.Expression(ending.value), name, "eval", _FLAGS, dont_inherit=True)
        text = None
        if body.body:
            self._evaluate(compile(body, name, "exec", _FLAGS, dont_inherit=True))
        if last is not None and (value := self._evaluate(last)) is not None:
            self.namespace["_"] = value
            whole = repr(value)
            text = shown.text(whole)
            shown.add("execute_result", _bundle(value, text))
        self._figures.show()
        return text

    def call(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Call a function that the code has defined, await it if it returns a coroutine, and return its value."""
        self.count += 1
        if name not in self.namespace:
            raise NameError(f"name {name!r} is not defined")
        value = self.namespace[name](*args, **kwargs)
        return self._await(value) if inspect.iscoroutine(value) else value

    def _evaluate(self, code: CodeType) -> Any:
        value = eval(code, self.namespace)
        return self._await(value) if code.co_flags & inspect.CO_COROUTINE else value

    def _await(self, value: Coroutine[Any, Any, Any]) -> Any:
        if self._loop is None or self._loop.is_closed():
            self._loop = asyncio.new_event_loop()
        task = self._loop.create_task(value)
        try:
            return self._loop.run_until_complete(task)
        except BaseException:
            # An interrupt is raised by the event loop, not in its task, which would go on at the next `await`.
            if not task.done() and not self._loop.is_closed():
                task.cancel()
                self._loop.run_until_complete(asyncio.wait([task]))
            raise


def describe(error: BaseException) -> dict[str, Any]:
    """Return an exception's name, message and traceback, truncated; methods of its class may raise anything."""
    name = _name(type(error))
    interrupted = False
    try:
        message = str(error)[:_EVALUE_CHARS]
    except BaseException as failure:
        message = f"<no message: str() raised {_name(type(failure))}>"
        interrupted = not isinstance(failure, Exception)
    lines = [f"{name}: {message}\n"]
    if not interrupted:  # formatting the traceback would call str() again
        with contextlib.suppress(BaseException):
            lines = _lines(error)
    return {"ename": name, "evalue": message, "traceback": lines}


def _name(kind: type) -> str:
    # Read from `type`, because a metaclass may return anything for `__name__`.
    return str(type.__dict__["__name__"].__get__(kind))[:_NAME_CHARS]


def _lines(error: BaseException) -> list[str]:
    summary = traceback.TracebackException.from_exception(error, compact=True)
    for each in _chain(summary):
        each.stack[:] = [frame for frame in each.stack if not frame.filename.startswith(_OURS)]
    text = "".join(summary.format())
    if len(text) > _TRACEBACK_CHARS:
        text = f"{text[: _TRACEBACK_CHARS // 2]}\n[...]\n{text[-_TRACEBACK_CHARS // 2 :]}"
    return text.splitlines(keepends=True)


def _chain(summary: traceback.TracebackException) -> list[traceback.TracebackException]:
    chain: list[traceback.TracebackException] = []
    unvisited = [summary]
    while unvisited and len(chain) < 32:
        chain.append(unvisited.pop())
        unvisited += [other for other in (chain[-1].__cause__, chain[-1].__context__) if other is not None]
    return chain
