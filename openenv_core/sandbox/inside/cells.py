"""One interpreter's code: compiled cell by cell, run in one namespace."""

import ast
import asyncio
import builtins
import contextlib
import inspect
import linecache
import os
import sys
import traceback
from collections.abc import Coroutine
from types import CodeType, ModuleType
from typing import Any, Final

from openenv_core.sandbox.inside.display import Shown, bundle
from openenv_core.sandbox.inside.figures import Figures

FLAGS: Final = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
TRACEBACK_CHARS: Final = 20_000
EVALUE_CHARS: Final = 10_000
NAME_CHARS: Final = 200

# Frames of files in here are ours and not shown.
_OURS: Final = os.path.dirname(__file__) + os.sep


class Cells:
    """The namespace, and what runs in it.

    Attributes:
        count: Executions so far.
    """

    def __init__(self) -> None:
        self.count = 0
        self._main = ModuleType("__main__")
        self._main.__dict__["__builtins__"] = builtins
        self._figures = Figures()
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def namespace(self) -> dict[str, Any]:
        """The variables of the code."""
        return self._main.__dict__

    def install(self) -> None:
        """Become the process's main module."""
        sys.modules["__main__"] = self._main
        self._figures.install()

    def run(self, code: str, shown: Shown) -> str | None:
        """Run a cell; return the text of its last expression's value, None where there is none.

        Raises:
            BaseException: Whatever the code raised.
        """
        self.count += 1
        name = f"<cell {self.count}>"
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
        self.namespace["display"] = shown.display
        self._figures.shown = shown
        body = compile(code, name, "exec", ast.PyCF_ONLY_AST | FLAGS, dont_inherit=True)
        last: CodeType | None = None
        if body.body and isinstance(ending := body.body[-1], ast.Expr):
            body.body.pop()
            last = compile(ast.Expression(ending.value), name, "eval", FLAGS, dont_inherit=True)
        text = None
        if body.body:
            self._evaluate(compile(body, name, "exec", FLAGS, dont_inherit=True))
        if last is not None and (value := self._evaluate(last)) is not None:
            self.namespace["_"] = value
            whole = repr(value)
            text = shown.text(whole)
            shown.add("execute_result", bundle(value, text))
        self._figures.flush()
        return text

    def call(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Call a function that the code defined; await what it returns, where that has to be awaited.

        Raises:
            NameError: There is none of that name.
            BaseException: Whatever it raised.
        """
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
            # An interrupt comes out of the loop, and not out of what it runs: that would go on with the next `await`.
            if not task.done() and not self._loop.is_closed():
                task.cancel()
                self._loop.run_until_complete(asyncio.wait([task]))
            raise


def describe(error: BaseException) -> dict[str, Any]:
    """Return an exception's name, message and traceback, bounded, whatever its class does to hinder that."""
    name = _name(type(error))
    interrupted = False
    try:
        message = str(error)[:EVALUE_CHARS]
    except BaseException as failure:
        message = f"<no message: str() raised {_name(type(failure))}>"
        interrupted = not isinstance(failure, Exception)
    lines = [f"{name}: {message}\n"]
    if not interrupted:  # the traceback would ask for the message once more
        with contextlib.suppress(BaseException):
            lines = _lines(error)
    return {"ename": name, "evalue": message, "traceback": lines}


def _name(kind: type) -> str:
    # As the interpreter knows it: a metaclass may answer for it with anything.
    return str(type.__dict__["__name__"].__get__(kind))[:NAME_CHARS]


def _lines(error: BaseException) -> list[str]:
    told = traceback.TracebackException(type(error), error, _users(error), compact=True)
    for each in _chain(told):
        each.stack[:] = [frame for frame in each.stack if not frame.filename.startswith(_OURS)]
    text = "".join(told.format())
    if len(text) > TRACEBACK_CHARS:
        text = f"{text[: TRACEBACK_CHARS // 2]}\n[...]\n{text[-TRACEBACK_CHARS // 2 :]}"
    return text.splitlines(keepends=True)


def _users(error: BaseException) -> Any:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_OURS):
        trace = trace.tb_next
    return trace


def _chain(told: traceback.TracebackException) -> list[traceback.TracebackException]:
    found: list[traceback.TracebackException] = []
    left = [told]
    while left and len(found) < 32:
        found.append(left.pop())
        left += [other for other in (found[-1].__cause__, found[-1].__context__) if other is not None]
    return found
