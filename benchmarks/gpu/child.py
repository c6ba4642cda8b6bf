"""`python -m benchmarks.gpu.child NAME FILE [--dry]`: runs one check, which writes each result to FILE at once."""

import ctypes
import json
import os
import signal
import sys
import traceback
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>
OURS = {"benchmarks", "examples", "envs", "openenv_core", "rl_bridge", "servers"}
MOST_CHARACTERS = 1500
MODULES = {
    **dict.fromkeys(("versions", "loss"), "stack"),
    **dict.fromkeys(("step", "attention", "train", "weights"), "training"),
    **dict.fromkeys(("reload", "decode", "blackjack"), "engines"),
}
"""The module of each check; separate modules, so that a check imports only the packages it needs."""


class SkipError(Exception):
    """The check cannot run on this machine."""


@dataclass(slots=True)
class Reporter:
    """Writes the results of a check to a file.

    Attributes:
        file: A file of JSON lines.
        dry: Run on the CPU with tiny shapes.
        size: Model size, for checks that have one in their name.
        met: Whether every value so far is within its bound.
    """

    file: Path
    dry: bool
    size: str
    met: bool = True

    def record(self, label: str, value: float | str, unit: str = "", *, at_most: float | None = None) -> None:
        """Write a result, and whether it is within its bound."""
        row: dict[str, object] = {"what": label, "value": value, "unit": unit}
        if at_most is not None:
            assert not isinstance(value, str)
            met = value <= at_most  # False for NaN
            row |= {"bar": f"at most {at_most:g}", "met": met}
            self.met = self.met and met
        self._write(row)

    def end(self, status: str, reason: str = "") -> None:
        """Write the status of the check."""
        self._write({"status": status, "why": reason})

    def _write(self, row: dict[str, object]) -> None:
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def device(self) -> str:
        """Return the device that the check computes on.

        Raises:
            SkipError: There is no GPU.
        """
        import torch

        if self.dry:
            return "cpu"
        if not torch.cuda.is_available():
            raise SkipError("torch sees no GPU here; --dry runs this on the CPU")
        return "cuda"


def missing_package(error: BaseException) -> str | None:
    """Return the third-party package whose absence caused an error; None if it is one of our modules."""
    while error.__cause__ is not None:
        error = error.__cause__
    name = error.name if isinstance(error, ModuleNotFoundError) and error.name is not None else "benchmarks"
    return None if name.partition(".")[0] in OURS else name


def main(name: str, file: str, *, dry: bool) -> int:
    """Run the check."""
    ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0)
    check, _, size = name.partition("-")
    reporter = Reporter(Path(file), dry, "tiny" if dry else size)
    if check in ("train", "weights"):  # as in the trainer's processes; before torch is imported
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    try:
        getattr(import_module(f"benchmarks.gpu.{MODULES[check]}"), check)(reporter)
    except SkipError as error:
        reporter.end("skipped", str(error))
    except Exception as error:
        if (missing := missing_package(error)) is not None:
            reporter.end("skipped", f"{missing} is not installed here")
        else:
            traceback.print_exc()
            where = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(where.filename).name}:{where.lineno}"
            reporter.end("failed", f"{type(error).__name__}: {error} ({place})"[:MOST_CHARACTERS])
    else:
        reporter.end(*(("passed",) if reporter.met else ("failed", "a figure is out of its bounds")))
    return 0


if __name__ == "__main__":
    from benchmarks.gpu import child  # the module that the checks import: `__main__` has another SkipError

    sys.exit(child.main(sys.argv[1], sys.argv[2], dry="--dry" in sys.argv[3:]))
