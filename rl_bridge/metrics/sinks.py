"""Metrics of each iteration to TensorBoard and to JSON lines."""

import contextlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self


class Sink(Protocol):
    """Takes the metrics of one iteration at a time."""

    def write(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of one iteration."""
        ...

    def rewind(self, iteration: int) -> None:
        """Forget what came after an iteration: it is trained again."""
        ...

    def close(self, *, failed: bool = False) -> None:
        """Flush and let go; `failed` says whether the run did."""
        ...


class JsonlSink:
    """One JSON object a line: `iteration`, then the metrics by name.

    Args:
        path: Appended to, so that a resumed run continues its file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("a", encoding="utf-8")

    def write(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Append a line, and flush it: a run that is cut off keeps what it has measured."""
        self._file.write(json.dumps({"iteration": iteration, **metrics}) + "\n")
        self._file.flush()

    def rewind(self, iteration: int) -> None:
        """Take the later lines out."""
        self._file.close()
        rewind(self._path, iteration)
        self._file = self._path.open("a", encoding="utf-8")

    def close(self, *, failed: bool = False) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):  # of a line that could not be written, as `write` has said
            self._file.close()


def environment_prefix(name: str) -> str:
    """Before the metrics of one of several environments; of one that is alone it is empty."""
    return f"env/{name}/" if name else ""


class EnvironmentSink(JsonlSink):
    """The rows of one of several environments, as those of a run on it alone would be.

    Args:
        path: As `JsonlSink`'s.
        name: The environment's.
    """

    def __init__(self, path: Path, name: str) -> None:
        super().__init__(path)
        self._prefix = environment_prefix(name)

    def write(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Append its own metrics, and those of the whole run that it has no own ones of."""
        shared = {name: value for name, value in metrics.items() if not name.startswith("env/")}
        own = {name: value for name, value in metrics.items() if name.startswith(self._prefix)}
        super().write(iteration, shared | {name.removeprefix(self._prefix): own[name] for name in own})


def rewind(path: Path, iteration: int) -> Mapping[str, float]:
    """Take from a file of JSON lines what came after an iteration, and lines that were cut off.

    Args:
        path: The file; it need not exist.
        iteration: The last one that stays.

    Returns:
        The last row that stays; empty where none does.
    """
    if not path.exists():
        return {}
    kept: list[bytes] = []
    last: dict[str, float] = {}
    # By bytes: text has more ends of lines than "\n", and a line that was cut off may end within a character.
    for line in path.read_bytes().split(b"\n"):
        try:
            row = json.loads(line)
            wanted = row["iteration"] <= iteration
        except (ValueError, TypeError, KeyError):
            continue
        if wanted:
            kept.append(line + b"\n")
            last = row
    written = path.with_suffix(".partial")
    written.write_bytes(b"".join(kept))
    written.replace(path)
    return last


class TensorBoardSink:
    """Event files that `tensorboard --logdir` reads.

    Args:
        folder: Where they go.
    """

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._folder = str(folder)
        self._make: Callable[..., SummaryWriter] = SummaryWriter
        self._writer = SummaryWriter(self._folder)

    def write(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Add one scalar a figure."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, iteration)

    def rewind(self, iteration: int) -> None:
        """Have TensorBoard forget what earlier files say of later iterations."""
        self._writer.close()
        self._writer = self._make(self._folder, purge_step=iteration + 1)

    def close(self, *, failed: bool = False) -> None:
        """Flush and close."""
        self._writer.close()


class MetricsLog:
    """Hands metrics to every sink.

    Args:
        sinks: Closed with the log.
    """

    def __init__(self, sinks: Iterable[Sink]) -> None:
        self._sinks = list(sinks)

    def write(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Hand the metrics of one iteration to every sink."""
        for sink in self._sinks:
            sink.write(iteration, metrics)

    def rewind(self, iteration: int) -> None:
        """Have every sink forget what came after an iteration."""
        for sink in self._sinks:
            sink.rewind(iteration)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.ExitStack() as closing:  # all of them, whatever one raises
            for sink in self._sinks:
                closing.callback(sink.close, failed=error is not None)
