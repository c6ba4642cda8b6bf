"""What runs the code: the package's own executor, or a plain one where the release's is not installed with it."""

from __future__ import annotations

import contextlib
import io
import traceback
from typing import Any

from openenv.core.env_server.types import CodeExecResult


class PlainExecutor:
    """Runs code in this process. For these tests, whose code is ours: releases need smolagents for theirs."""

    def __init__(self, additional_imports: list[str] | None = None) -> None:
        self._names: dict[str, Any] = {}

    def run(self, code: str) -> CodeExecResult:
        stdout, stderr = io.StringIO(), io.StringIO()
        exit_code = 0
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            try:
                exec(code, self._names)
            except Exception:
                traceback.print_exc()
                exit_code = 1
        return CodeExecResult(stdout=stdout.getvalue(), stderr=stderr.getvalue(), exit_code=exit_code)


try:
    from openenv.core.tools.local_python_executor import PyExecutor
except ModuleNotFoundError:  # smolagents
    PyExecutor = PlainExecutor
