"""Reports as Markdown tables, with each way to call relative to the SDK's in-process call."""

from collections.abc import Iterator

from benchmarks.mcp.measures import IN_PROCESS
from benchmarks.wire.measurements import Measurements
from benchmarks.wire.report import table

NAMES = ("p50 µs", "calls/s", "client µs a call", "server µs a call")


def report(measurements: Measurements) -> str:
    """Return the tables of a run, and what could not be measured."""
    parts = [
        f"### {load}\n\n" + table(("way", *NAMES, "p50 over in-process"), list(_rows(measurements, load)))
        for load in dict.fromkeys(load for _, _, load in measurements.values)
    ]
    if measurements.notes:
        parts.append("### Not measured\n\n" + "\n".join(f"- {note}" for note in measurements.notes))
    return "\n\n".join(parts)


def _rows(measurements: Measurements, load: str) -> Iterator[tuple[str, ...]]:
    floor = measurements.median("p50 µs", IN_PROCESS, load)
    for method in dict.fromkeys(subject for _, subject, under in measurements.values if under == load):
        cells = [measurements.median(name, method, load) for name in NAMES]
        over = "" if floor is None or cells[0] is None else f"{cells[0] / floor:.2f}"
        yield (method, *("" if cell is None else f"{cell:,.0f}" for cell in cells), over)
