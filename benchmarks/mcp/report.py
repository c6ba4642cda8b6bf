"""Figures as Markdown tables, and each way over the call that nothing lies between."""

from collections.abc import Iterator

from benchmarks.mcp.measures import IN_PROCESS
from benchmarks.wire.figures import Figures
from benchmarks.wire.report import table

NAMES = ("p50 µs", "calls/s", "client µs a call", "server µs a call")


def report(figures: Figures) -> str:
    """Return the tables of a run, and what could not be measured."""
    parts = [
        f"### {load}\n\n" + table(("way", *NAMES, "p50 over in-process"), list(_rows(figures, load)))
        for load in dict.fromkeys(load for _, _, load in figures.values)
    ]
    if figures.notes:
        parts.append("### Not measured\n\n" + "\n".join(f"- {note}" for note in figures.notes))
    return "\n\n".join(parts)


def _rows(figures: Figures, load: str) -> Iterator[tuple[str, ...]]:
    floor = figures.median("p50 µs", IN_PROCESS, load)
    for way in dict.fromkeys(who for _, who, under in figures.values if under == load):
        cells = [figures.median(name, way, load) for name in NAMES]
        over = "" if floor is None or cells[0] is None else f"{cells[0] / floor:.2f}"
        yield (way, *("" if cell is None else f"{cell:,.0f}" for cell in cells), over)
