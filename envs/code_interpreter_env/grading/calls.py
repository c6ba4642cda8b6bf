"""Calls of a function in an interpreter, whether it knows how to make them or only how to run code."""

import inspect
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol, cast, runtime_checkable

from openenv_core.sandbox import Call, CodeError, Execution, Interpreter, values
from openenv_core.sandbox.values import NotPlain, dumps, loads

NOT_PLAIN: Final = "NotPlain"
"""What the error is called where a function answered something that does not cross."""

_HELPER: Final = "_values_for_calls"

_INSTALL: Final = f"""
import sys as _s, types as _t
_m = _t.ModuleType({_HELPER!r})
_s.modules[{_HELPER!r}] = _m
exec(compile({inspect.getsource(values)!r}, {_HELPER!r}, "exec"), _m.__dict__)
del _s, _t, _m
"""

# One expression statement, so that nothing but the submission's own names is left in its namespace.
_CALL: Final = """
(lambda values, function, args, kwargs: print(
    "\\n" + {marker!r} + values.dumps(function(*args, **kwargs), max_bytes={room}).decode() + "\\n" + {marker!r}
))(
    __import__("sys").modules[{helper!r}],
    {function},
    __import__("sys").modules[{helper!r}].loads({args!r}),
    __import__("sys").modules[{helper!r}].loads({kwargs!r}),
)
"""


@runtime_checkable
class Calls(Protocol):
    """An interpreter of our own sandbox."""

    async def call(
        self,
        function: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Call:
        """Call a function that the code defined."""


async def call_function(
    interpreter: Interpreter,
    function: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    timeout_s: float,
) -> Call:
    """Call a function that the code of an interpreter defined.

    An interpreter that only runs code is given the call as code, and prints the answer as tagged JSON behind a random
    marker. What it prints is as little trusted as any answer: forging it is the same as returning it.

    Args:
        interpreter: where.
        function: its name.
        args: by position.
        kwargs: by name.
        timeout_s: seconds.
    """
    if isinstance(interpreter, Calls):
        return await cast(Calls, interpreter).call(function, args, kwargs, timeout_s=timeout_s)
    installed = await interpreter.execute(_INSTALL, timeout_s=timeout_s)
    if installed.status != "ok":
        return Call(execution=installed)
    marker = secrets.token_hex(16)
    room = 48 << 10  # what is kept of standard output is 64 KiB, where nothing else is said
    execution = await interpreter.execute(
        _CALL.format(
            marker=marker,
            helper=_HELPER,
            function=function,
            room=room,
            args=dumps(list(args)),
            kwargs=dumps(dict(kwargs)),
        ),
        timeout_s=timeout_s,
    )
    return _read(execution, marker) if execution.status == "ok" else Call(execution=execution)


def _read(execution: Execution, marker: str) -> Call:
    parts = execution.stdout.rsplit(marker, 2)
    try:
        if len(parts) == 3:
            return Call(execution=execution, value=loads(parts[1].encode()))
    except NotPlain:
        pass
    said = CodeError(ename=NOT_PLAIN, evalue="no answer was found in what was printed")
    return Call(execution=_failed(execution, said))


def _failed(execution: Execution, error: CodeError) -> Execution:
    return Execution(
        status="error",
        stdout=execution.stdout,
        stderr=execution.stderr,
        exit_code=1,
        error=error,
        session_id=execution.session_id,
        isolation=execution.isolation,
    )
