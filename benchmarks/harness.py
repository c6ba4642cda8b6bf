"""The harness of all benchmarks: options, rounds, tables, bars, the result file.

A benchmark is a module of this package, or a package with a `__main__.py` that imports its parts:

    @dataclass(frozen=True, kw_only=True)
    class Plan:
        rounds: int = setting(5, quick=1, option="rounds")   # with --quick 1; the option --rounds
        seconds: float = setting(2.0, quick=0.1)             # no option

    def measure(plan: Plan, measurements: Measurements) -> None:
        for _, kind in in_rounds(plan.rounds, ("ours", "theirs")):
            measurements.add("calls/s", kind, "1 client", ...)   # figure, subject, load, value

    def bars(measurements: Measurements) -> Iterator[Bar]:
        yield from at_least("ours, calls/s", measurements.median("calls/s", "ours", "1 client"), 100)

    BENCHMARK = Benchmark(about=__doc__, plan=Plan, sections=(measure,), tables={"Calls": ("calls/s",)}, bars=bars)

    if __name__ == "__main__":
        main("NAME")
"""

import argparse
import dataclasses
import json
import math
import platform
import signal
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any, Generic, Literal, NoReturn, TypeVar

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells report it."""
FAILED = 2
MISSED = 1
"""Exit status with --check if a bar is not met."""

T = TypeVar("T")
P = TypeVar("P")


class BenchmarkError(Exception):
    """A measured process or operation failed."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A measured value and the bound that it is compared with.

    Attributes:
        label: Name of the value.
        value: Measured value.
        bound: The limit.
        kind: Whether the value must be at most or at least the bound.
    """

    label: str
    value: float
    bound: float
    kind: Literal["at most", "at least"]

    @property
    def met(self) -> bool:
        """Whether the value is within the bound."""
        return self.value <= self.bound if self.kind == "at most" else self.value >= self.bound


def at_most(label: str, value: float | None, bound: float) -> Iterator[Bar]:
    """Yield the bar of a value, if it was measured."""
    if value is not None:
        yield Bar(label, value, bound, "at most")


def at_least(label: str, value: float | None, bound: float) -> Iterator[Bar]:
    """Yield the bar of a value, if it was measured."""
    if value is not None:
        yield Bar(label, value, bound, "at least")


def ratio(value: float | None, base: float | None) -> float | None:
    """Return `value` / `base`; None if one of them was not measured, or the base is 0."""
    return None if value is None or not base else value / base


@dataclass(slots=True)
class Measurements:
    """The values of every round.

    Attributes:
        values: Values by figure, subject and load ("64 sessions"); the load may be empty.
        notes: What could not be measured, and why.
    """

    values: dict[tuple[str, str, str], list[float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, figure: str, subject: str, load: str, value: float | None) -> None:
        """Add one round's value; None is left out."""
        if value is not None:
            self.values.setdefault((figure, subject, load), []).append(value)

    def add_all(self, subject: str, load: str, values: Mapping[str, float | None]) -> None:
        """Add one round's values by figure."""
        for figure, value in values.items():
            self.add(figure, subject, load, value)

    def add_times(
        self,
        name: str,
        subject: str,
        load: str,
        times_ms: Sequence[float],
        percents: Sequence[int] = (50, 95),
    ) -> None:
        """Add percentiles of durations, as "NAME p50 ms"."""
        for percent in percents:
            self.add(f"{name} p{percent} ms", subject, load, percentile(times_ms, percent))

    def median(self, figure: str, subject: str, load: str = "") -> float | None:
        """Return the median over the rounds; None if nothing was measured."""
        values = self.values.get((figure, subject, load))
        return None if values is None else statistics.median(values)

    def most(self, figure: str, subject: str, load: str = "") -> float | None:
        """Return the largest value of all rounds; None if nothing was measured."""
        return max(self.values.get((figure, subject, load), ()), default=None)

    def measured(self, *figures: str) -> list[tuple[str, str]]:
        """Return each subject and load with one of the figures; those of a load together, in order of measurement."""
        keys = dict.fromkeys((subject, load) for figure, subject, load in self.values if figure in figures)
        loads = list(dict.fromkeys(load for _, load in keys))
        return sorted(keys, key=lambda key: loads.index(key[1]))

    def loads(self, figure: str) -> list[str]:
        """Return the loads under which a figure was measured, in order of measurement."""
        return list(dict.fromkeys(load for _, load in self.measured(figure)))

    def as_json(self, bars: Iterable[Bar]) -> dict[str, Any]:
        """Return the measurements, notes and bars as JSON values."""
        figures = [
            {
                "figure": figure,
                "of": subject,
                "load": load,
                "median": statistics.median(values),
                "rounds": values,
            }
            for (figure, subject, load), values in self.values.items()
        ]
        met = [{"what": bar.label, "value": bar.value, "met": bar.met} for bar in bars]
        return {"figures": figures, "notes": self.notes, "bars": met}


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that `percent` percent of the values do not exceed; 0 without values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)] if ordered else 0.0


def setting(
    default: T, *, quick: T | None = None, option: str = "", read: Callable[[str], T] | None = None
) -> T:
    """Return a field of a plan.

    Args:
        default: Its value.
        quick: Its value with --quick, if that differs.
        option: Help of its option; without, it has none. A field that is False is a flag.
        read: Parses the option; without, it is a number of at least 1.
    """
    made: T = field(default=default, metadata={"quick": quick, "option": option, "read": read})
    return made


@dataclass(frozen=True, kw_only=True)
class Benchmark(Generic[P]):
    """What a benchmark's command measures and prints.

    Attributes:
        about: Description and examples, for --help.
        plan: A dataclass whose fields are made by `setting`.
        sections: The measurements; --only selects some by their names.
        tables: Figures of each table, by its title.
        bars: Yields the bars that measurements exist for.
        prepare: Returns the plan for this machine, and notes what cannot be measured.
        derive: Adds figures computed from others, at the end.
        errors: Expected errors; any other is a bug of the benchmark and is raised.
    """

    about: str | None
    plan: type[P]
    sections: Sequence[Callable[[P, Measurements], None]]
    tables: Mapping[str, Sequence[str]]
    bars: Callable[[Measurements], Iterator[Bar]] = lambda _: iter(())
    prepare: Callable[[P, Measurements], P] = lambda plan, _: plan
    derive: Callable[[Measurements], None] = lambda _: None
    errors: tuple[type[Exception], ...] = (BenchmarkError,)

    def parser(self, name: str) -> argparse.ArgumentParser:
        """Return the parser of `python -m benchmarks.NAME`."""
        parser = argparse.ArgumentParser(
            prog=f"python -m benchmarks.{name}",
            description=self.about,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.add_argument("--quick", action="store_true", help="tiny numbers, which only show that it runs")
        parser.add_argument("--check", action="store_true", help=f"exit with {MISSED} if a bar is not met")
        parser.add_argument("--json", type=Path, metavar="FILE", help="write the values of every round there")
        if len(self.sections) > 1:
            names = tuple(section.__name__ for section in self.sections)
            parser.add_argument(
                "--only", type=choices(names), metavar="NAME,...", help=f"of {', '.join(names)}"
            )
        for each in dataclasses.fields(self.plan):  # type: ignore[arg-type]
            if text := each.metadata.get("option"):
                how: dict[str, Any] = {"action": "store_true", "default": None, "help": text}
                if each.default is not False:
                    how = {"type": each.metadata["read"] or count, "metavar": "VALUE", "help": text}
                parser.add_argument(f"--{each.name.replace('_', '-')}", **how)
        return parser

    def run(self, name: str, argv: Sequence[str] | None = None) -> int:
        """Measure, print the report, and return the exit status."""
        arguments = self.parser(name).parse_args(argv)
        chosen: dict[str, Any] = {}
        for each in dataclasses.fields(self.plan):  # type: ignore[arg-type]
            given = getattr(arguments, each.name, None)
            value = each.metadata.get("quick") if given is None and arguments.quick else given
            if value is not None:
                chosen[each.name] = value
        measurements, status = Measurements(), 0
        signal.signal(signal.SIGTERM, interrupt)
        try:
            plan = self.prepare(self.plan(**chosen), measurements)
            for note in measurements.notes:
                print(f"benchmarks.{name}: going on without {note}", file=sys.stderr)
            only = getattr(arguments, "only", None)
            for section in self.sections:
                if only is None or section.__name__ in only:
                    try:
                        section(plan, measurements)
                    except self.errors as error:
                        status = FAILED
                        measurements.notes.append(f"the rest of {section.__name__}: {error}")
        except KeyboardInterrupt:
            status = INTERRUPTED
            measurements.notes.append("the rest: interrupted; everything that was started is stopped")
        progress("")
        self.derive(measurements)
        bars = list(self.bars(measurements))
        options = "".join(f", {key} {value}" for key, value in chosen.items())
        print(
            f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, Python {platform.python_version()}{options}; medians\n"
        )
        print(self.report(measurements, bars))
        if arguments.json is not None:
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            document = json.dumps(measurements.as_json(bars), indent=1, ensure_ascii=False)
            arguments.json.write_text(f"{document}\n")
        return status or (MISSED if arguments.check and not all(bar.met for bar in bars) else 0)

    def report(self, measurements: Measurements, bars: Sequence[Bar]) -> str:
        """Return the tables, the bars, and what could not be measured, as Markdown."""
        parts = []
        for title, figures in self.tables.items():
            rows = [
                (
                    load,
                    subject,
                    *(format_number(measurements.median(figure, subject, load)) for figure in figures),
                )
                for subject, load in measurements.measured(*figures)
            ]
            if rows:
                parts.append(f"### {title}\n\n{table(('load', 'of', *figures), rows)}")
        if bars:
            cells = [
                (
                    bar.label,
                    format_number(bar.value),
                    f"{bar.kind} {bar.bound:g}",
                    "met" if bar.met else "NOT met",
                )
                for bar in bars
            ]
            parts.append(f"### Bars\n\n{table(('what', 'measured', 'bar', ''), cells)}")
        if measurements.notes:
            parts.append("### Not measured\n\n" + "\n".join(f"- {note}" for note in measurements.notes))
        return "\n\n".join(parts)


def main(name: str) -> NoReturn:
    """Run the command `python -m benchmarks.NAME`.

    The benchmark is imported, so that other processes find its classes in the same module.
    """
    sys.exit(load(name).run(name))


def load(name: str) -> Benchmark[Any]:
    """Return the benchmark of a module, or of a package's `__main__`."""
    module = import_module(f"benchmarks.{name}")
    if hasattr(module, "__path__"):
        module = import_module(f"benchmarks.{name}.__main__")
    benchmark: Benchmark[Any] = module.BENCHMARK
    return benchmark


def in_rounds(rounds: int, subjects: Iterable[T], what: str = "") -> Iterator[tuple[int, T]]:
    """Yield the number of the round, from 0, with each subject; the order of subjects alternates between rounds."""
    known = list(subjects)
    for number in range(rounds):
        for subject in reversed(known) if number % 2 else known:
            progress(f"{what}round {number + 1} of {rounds}: {format_subject(subject)}")
            yield number, subject


def format_subject(subject: object) -> str:
    """Return a subject of a round as text: its name, if it has one."""
    parts = subject if isinstance(subject, tuple) else (subject,)
    return ", ".join(str(getattr(part, "name", part)) for part in parts)


def progress(text: str) -> None:
    """Report what is being measured: a terminal's line is overwritten, elsewhere each report is a new line."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
    elif text:
        print(text, file=sys.stderr, flush=True)


def interrupt(_signal: int, _frame: FrameType | None) -> None:
    """Handle a signal as Ctrl-C."""
    raise KeyboardInterrupt


def count(text: str) -> int:
    """Parse an option that is a number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {text!r}")
    return int(text)


def choices(allowed: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Return an argparse type: a comma-separated list of allowed names."""

    def read(text: str) -> tuple[str, ...]:
        names = tuple(text.replace(",", " ").split())
        if not names or not set(names) <= set(allowed):
            raise argparse.ArgumentTypeError(f"expected some of {', '.join(allowed)}, got {text!r}")
        return names

    return read


def format_number(value: float | None) -> str:
    """Return a value with at least three digits; nothing if it was not measured."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:#.3g}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table whose columns are aligned; a column without cells is left out."""
    lines = [head, *rows]
    columns = [column for column in zip(*lines, strict=True) if any(column[1:])]
    widths = [max(map(len, column)) for column in columns]
    texts = [
        " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        for line in zip(*columns, strict=True)
    ]
    texts.insert(1, " | ".join("-" * width for width in widths))
    return "\n".join(f"| {text} |" for text in texts)
