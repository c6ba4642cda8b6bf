"""The figures as Markdown tables, and the bars that they are held against."""

from collections.abc import Iterator, Sequence
from typing import Final

from benchmarks.sandbox.measures import EXEC, JUPYTER, RUN
from benchmarks.wire.bars import Bar
from benchmarks.wire.figures import Figures
from benchmarks.wire.report import table, verdicts

START_MS: Final = {"namespaces": 30.0, "lsm": 15.0}
BURST_MS: Final = 1000.0
BURST_RATIO: Final = 1 / 20
"""Of what as many `docker run` take."""

EXECUTE_MS: Final = 1.0
MEMORY_MB: Final = 5.0
LOOPS: Final = 1.05

TABLES: Sequence[tuple[str, Sequence[str]]] = (
    ("Start of a session", ("start p50 ms", "start p95 ms", "CPU ms")),
    (
        "Sessions that begin at once, each to its first result",
        ("burst p50 ms", "burst p99 ms", "burst CPU ms", "machine's load"),
    ),
    ("Warm execute", ("execute p50 ms", "execute p95 ms", "CPU µs")),
    ("Sessions that execute at once", ("executions/s", "server and sandbox µs")),
    ("Memory, proportional", ("MB a session", "server kB a session")),
    ("Loops in pure Python, CPU time", ("inside µs a turn", "plain python µs a turn", "inside / plain")),
    (
        "Sessions abandoned by clients that are killed",
        ("opened and used s", "reclaimed s", "processes left", "files left", "descriptors left"),
    ),
)


def bars(figures: Figures) -> Iterator[Bar]:
    """Yield every bar that this run has the figures for."""
    for level, bound in START_MS.items():
        for load in figures.loads("start p50 ms"):
            if (value := figures.median("start p50 ms", level, load)) is not None:
                yield Bar(f"start of a session, {level}, {load}: p50, ms", value, bound, "at most")
    docker = next((figures.median(*key) for key in _of(figures, "burst p99 ms") if key[1] == RUN), None)
    for _, who, load in _of(figures, "burst p99 ms"):
        value = figures.median("burst p99 ms", who, load)
        if who in START_MS and value is not None:
            yield Bar(f"{load}, {who}: p99, ms", value, BURST_MS, "at most")
            if docker is not None:
                yield Bar(f"{load}, {who}: p99 / {RUN}", value / docker, BURST_RATIO, "at most")
    for _, who, load in _of(figures, "execute p50 ms"):
        if load == "through the WebSocket":
            value = figures.median("execute p50 ms", who, load)
            assert value is not None
            yield Bar(f"warm execute {load}, {who}: p50, ms", value, EXECUTE_MS, "at most")
    for _, who, load in _of(figures, "server kB a session"):
        value = figures.median("MB a session", who, load)
        assert value is not None
        yield Bar(f"memory, {who}, {load}: MB a session", value, MEMORY_MB, "at most")
    for _, who, load in _of(figures, "inside / plain"):
        value = figures.median("inside / plain", who, load)
        assert value is not None
        yield Bar(f"loops in pure Python, {who}: inside / plain", value, LOOPS, "at most")
    for _, who, load in _of(figures, "processes left"):
        left = sum(
            figures.median(name, who, load) or 0
            for name in ("processes left", "files left", "descriptors left")
        )
        yield Bar(f"{load}, {who}: processes, files, descriptors left", left, 0, "at most")


def ratios(figures: Figures) -> Iterator[tuple[str, str]]:
    """Yield how many times longer others take than each of our levels."""
    for figure, peers in (("start p50 ms", (JUPYTER, RUN)), ("execute p50 ms", (JUPYTER, EXEC, RUN))):
        for _, who, load in _of(figures, figure):
            if who in (JUPYTER, EXEC, RUN):
                continue
            mine = figures.median(figure, who, load)
            for peer in peers:
                theirs = next(
                    (figures.median(figure, p, at) for _, p, at in _of(figures, figure) if p == peer), None
                )
                if mine and theirs:
                    yield f"{figure.partition(' ')[0]}: {peer} / {who}, {load}", f"{theirs / mine:.0f}"


def report(figures: Figures, held: Sequence[Bar]) -> str:
    """Return the tables, the bars, and what could not be measured."""
    parts = []
    for title, names in TABLES:
        keys = dict.fromkeys((who, load) for name, who, load in figures.values if name in names)
        rows = [
            (who, load, *(_number(figures.median(name, who, load)) for name in names)) for who, load in keys
        ]
        if title.startswith("Warm"):
            rows.sort(key=lambda row: row[1])
        if rows:
            parts.append(f"### {title}\n\n" + table(("of", "", *names), rows))
    if many := list(ratios(figures)):
        parts.append("### How many times longer others take\n\n" + table(("what", "times"), many))
    parts += verdicts(figures, held)
    return "\n\n".join(parts)


def _of(figures: Figures, figure: str) -> list[tuple[str, str, str]]:
    return [key for key in figures.values if key[0] == figure]


def _number(value: float | None) -> str:
    if value is None:
        return ""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
