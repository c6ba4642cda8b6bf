"""What `ropewalk build` and `ropewalk push` show while they work."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, Final

from openenv_core.images.events import (
    Cached,
    Event,
    Layer,
    Note,
    Step,
    StepOutput,
)

_LAYER_REPORT_INTERVAL_S: Final = 15.0
"""Seconds after which plain output says that a layer is still under way."""


@contextmanager
def show_events(*, verbose: bool = False, stream: IO[str] | None = None) -> Iterator["ProgressDisplay"]:
    """Show events until the block ends: a line that moves on a terminal, lines that stay elsewhere."""
    stream = stream or sys.stderr
    if not verbose and stream.isatty():
        try:
            from rich.console import Console
        except ImportError:
            pass
        else:
            console = Console(file=stream, highlight=False)
            with console.status("") as status:
                found: ProgressDisplay = OnTerminal(console, status)
                yield found
                found.end()
            return
    plain = Plain(stream, verbose=verbose)
    yield plain
    plain.end()


class ProgressDisplay:
    """Shows events; call it with one."""

    def __call__(self, event: Event) -> None:
        """Show one event."""
        raise NotImplementedError

    def end(self) -> None:
        """The work has ended well."""


class Plain(ProgressDisplay):
    """Lines that stay: for logs, and for terminals without `rich`."""

    def __init__(self, stream: IO[str], *, verbose: bool) -> None:
        self._stream = stream
        self._verbose = verbose
        self._layers: dict[str, tuple[str, float]] = {}

    def __call__(self, event: Event) -> None:
        """Show one event."""
        match event:
            case Step():
                self._line(f"[{event.number}/{event.total}] {_first(event.text)}")
            case Cached():
                self._line("  cached")
            case StepOutput() if self._verbose:
                self._line(f"  {event.line}")
            case Layer():
                before, since = self._layers.get(event.name, ("", 0.0))
                now = time.monotonic()
                # A layer tells of itself many times a second: its words when they change, else now and then.
                if event.status != before or (event.total and now - since > _LAYER_REPORT_INTERVAL_S):
                    self._layers[event.name] = (event.status, now)
                    self._line(f"  {_layer(event)}")
            case Note():
                self._line(f"note: {event.text}")

    def _line(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


class OnTerminal(ProgressDisplay):
    """Steps that stay, with how long they took, above a line that says what goes on."""

    def __init__(self, console: Any, status: Any) -> None:
        self._console = console
        self._status = status
        self._step: Step | None = None
        self._cached = False
        self._since = time.monotonic()
        self._layers: dict[str, Layer] = {}

    def __call__(self, event: Event) -> None:
        """Show one event."""
        match event:
            case Step():
                self.end()
                self._step, self._cached, self._since = event, False, time.monotonic()
                self._show("")
            case Cached():
                self._cached = True
            case StepOutput():
                self._show(event.line)
            case Layer():
                self._layers[event.name] = event
                self._show(_layers(self._layers.values()))
            case Note():
                self._console.print(f"note: {event.text}", markup=False)

    def end(self) -> None:
        """Let the step that ran stay."""
        if self._step is None:
            return
        took = "cached" if self._cached else f"{time.monotonic() - self._since:.1f} s"
        text = f"[{self._step.number}/{self._step.total}] {_first(self._step.text)}"
        self._console.print(f"{_shorten(text, self._console.width - 12)}  {took}", markup=False)
        self._step = None

    def _show(self, detail: str) -> None:
        from rich.text import Text

        step = f"[{self._step.number}/{self._step.total}] {_first(self._step.text)}" if self._step else ""
        parts = [_shorten(step, self._console.width // 2), detail] if step else [detail]
        line = " | ".join(part for part in parts if part)
        self._status.update(Text(_shorten(line, self._console.width - 4)))


def _layer(layer: Layer) -> str:
    amount = f" {_size(layer.done)}/{_size(layer.total)}" if layer.total else ""
    return f"{layer.name}: {layer.status}{amount}"


def _layers(layers: Any) -> str:
    found = list(layers)
    moving = [layer for layer in found if layer.total and layer.done < layer.total]
    if not moving:
        return _layer(found[-1])
    done, total = sum(layer.done for layer in moving), sum(layer.total for layer in moving)
    return f"{len(moving)} layers, {_size(done)}/{_size(total)}: {moving[-1].status}"


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def _first(text: str) -> str:
    """Return an instruction on one line."""
    return " ".join(text.split())


def _shorten(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: max(width - 3, 0)]}..."
