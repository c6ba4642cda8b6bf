"""Figures of each iteration to TensorBoard, to JSON lines, and in memory for the report."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self


class Sink(Protocol):
    """Takes the figures of one iteration at a time."""

    def write(self, iteration: int, figures: Mapping[str, float]) -> None:
        """Take the figures of one iteration."""
        ...

    def close(self) -> None:
        """Flush and let go."""
        ...


class JsonlSink:
    """One JSON object a line: `iteration`, then the figures by name.

    Args:
        path: Appended to, so that a resumed run continues its file.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def write(self, iteration: int, figures: Mapping[str, float]) -> None:
        """Append a line, and flush it: a run that is cut off keeps what it has measured."""
        self._file.write(json.dumps({"iteration": iteration, **figures}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoardSink:
    """Event files that `tensorboard --logdir` reads.

    Args:
        folder: Where they go.
    """

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    def write(self, iteration: int, figures: Mapping[str, float]) -> None:
        """Add one scalar a figure."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, iteration)

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


class MetricsLog:
    """Hands figures to every sink.

    Args:
        sinks: Closed with the log.
    """

    def __init__(self, sinks: Iterable[Sink]) -> None:
        self._sinks = list(sinks)

    def write(self, iteration: int, figures: Mapping[str, float]) -> None:
        """Hand the figures of one iteration to every sink."""
        for sink in self._sinks:
            sink.write(iteration, figures)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for sink in self._sinks:
            sink.close()
