"""Reports as Markdown tables that are readable in a terminal."""

from collections.abc import Iterable, Sequence

from benchmarks.wire.bars import Bar
from benchmarks.wire.measurements import Measurements

_TABLES: Sequence[tuple[str, Sequence[str]]] = (
    ("Steps", ("steps/s", "p50 ms", "p99 ms", "server µs a step", "over the floor")),
    ("Cost of metrics: server CPU", ("metrics on / off",)),
    ("Clients: CPU of the client's process, against our server", ("client µs a step",)),
    ("Memory of idle sessions", ("kB a session",)),
    ("Starting", ("start s", "memory MB", "import s")),
    (
        "Sessions whose step waits for 1 s, four steps each: started over 1 s, then all at once",
        (
            "% succeed",
            "p50 s",
            "p99 s",
            "% succeed at once",
            "p50 s at once",
            "p99 s at once",
            "server µs a waiting step",
            "kB a connection",
        ),
    ),
)


def report(measurements: Measurements, all_bars: Sequence[Bar]) -> str:
    """Return the tables of a run, the bars, and what could not be measured."""
    sections = [_table_of(measurements, title, names) for title, names in _TABLES]
    sections += verdicts(measurements, all_bars)
    return "\n\n".join(section for section in sections if section)


def verdicts(measurements: Measurements, all_bars: Iterable[Bar], form: str = ".2f") -> list[str]:
    """Return the last sections of a report: the bars, if any, and what could not be measured.

    Args:
        measurements: Measurements, whose notes are listed.
        all_bars: The bars.
        form: Format of measured values.
    """
    rows = [
        (bar.label, f"{bar.value:{form}}", f"{bar.kind} {bar.bound:g}", "met" if bar.met else "NOT met")
        for bar in all_bars
    ]
    parts = ["### Bars\n\n" + table(("what", "measured", "bar", ""), rows)] if rows else []
    if measurements.notes:
        parts.append("### Not measured\n\n" + "\n".join(f"- {note}" for note in measurements.notes))
    return parts


def _table_of(measurements: Measurements, title: str, names: Sequence[str]) -> str:
    keys = dict.fromkeys((subject, load) for name, subject, load in measurements.values if name in names)
    loads = list(dict.fromkeys(load for _, load in keys))
    rows = [
        (load, subject, *(_number(measurements.median(name, subject, load)) for name in names))
        for load in loads
        for subject, under in keys
        if under == load
    ]
    return f"### {title}\n\n" + table(("load", "of", *names), rows) if rows else ""


def _number(value: float | None) -> str:
    if value is None:
        return ""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table whose columns are aligned."""
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    texts = [
        " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines
    ]
    texts.insert(1, " | ".join("-" * width for width in widths))
    return "\n".join(f"| {text} |" for text in texts)
