"""Reports as Markdown tables, and the bounds that results are checked against."""

from collections.abc import Iterator, Sequence
from typing import Final

from benchmarks.sandbox.measures import EXEC, JUPYTER, RUN
from benchmarks.wire.bars import Bar
from benchmarks.wire.measurements import Measurements
from benchmarks.wire.report import table, verdicts

START_MS: Final = {"namespaces": 30.0, "lsm": 15.0}
BURST_MS: Final = 1000.0
BURST_RATIO: Final = 1 / 20
"""Bound relative to as many `docker run` at once."""

EXECUTE_MS: Final = 1.0
MEMORY_MB: Final = 5.0
LOOPS: Final = 1.05

TABLES: Sequence[tuple[str, Sequence[str]]] = (
    ("Start of a session", ("start p50 ms", "start p95 ms", "CPU ms")),
    (
        "Sessions started at once, each to its first result",
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


def bars(measurements: Measurements) -> Iterator[Bar]:
    """Yield every bar that this run has measurements for."""
    for level, bound in START_MS.items():
        for load in measurements.loads("start p50 ms"):
            if (value := measurements.median("start p50 ms", level, load)) is not None:
                yield Bar(f"start of a session, {level}, {load}: p50, ms", value, bound, "at most")
    docker = next(
        (measurements.median(*key) for key in _of(measurements, "burst p99 ms") if key[1] == RUN), None
    )
    for _, subject, load in _of(measurements, "burst p99 ms"):
        value = measurements.median("burst p99 ms", subject, load)
        if subject in START_MS and value is not None:
            yield Bar(f"{load}, {subject}: p99, ms", value, BURST_MS, "at most")
            if docker is not None:
                yield Bar(f"{load}, {subject}: p99 / {RUN}", value / docker, BURST_RATIO, "at most")
    for _, subject, load in _of(measurements, "execute p50 ms"):
        if load == "through the WebSocket":
            value = measurements.median("execute p50 ms", subject, load)
            assert value is not None
            yield Bar(f"warm execute {load}, {subject}: p50, ms", value, EXECUTE_MS, "at most")
    for _, subject, load in _of(measurements, "server kB a session"):
        value = measurements.median("MB a session", subject, load)
        assert value is not None
        yield Bar(f"memory, {subject}, {load}: MB a session", value, MEMORY_MB, "at most")
    for _, subject, load in _of(measurements, "inside / plain"):
        value = measurements.median("inside / plain", subject, load)
        assert value is not None
        yield Bar(f"loops in pure Python, {subject}: inside / plain", value, LOOPS, "at most")
    for _, subject, load in _of(measurements, "processes left"):
        left = sum(
            measurements.median(name, subject, load) or 0
            for name in ("processes left", "files left", "descriptors left")
        )
        yield Bar(f"{load}, {subject}: processes, files, descriptors left", left, 0, "at most")


def ratios(measurements: Measurements) -> Iterator[tuple[str, str]]:
    """Yield how many times longer the peers take than each of our levels."""
    for metric, peers in (("start p50 ms", (JUPYTER, RUN)), ("execute p50 ms", (JUPYTER, EXEC, RUN))):
        for _, subject, load in _of(measurements, metric):
            if subject in (JUPYTER, EXEC, RUN):
                continue
            mine = measurements.median(metric, subject, load)
            for peer in peers:
                theirs = next(
                    (
                        measurements.median(metric, p, at)
                        for _, p, at in _of(measurements, metric)
                        if p == peer
                    ),
                    None,
                )
                if mine and theirs:
                    yield f"{metric.partition(' ')[0]}: {peer} / {subject}, {load}", f"{theirs / mine:.0f}"


def report(measurements: Measurements, all_bars: Sequence[Bar]) -> str:
    """Return the tables, the bars, and what could not be measured."""
    parts = []
    for title, names in TABLES:
        keys = dict.fromkeys((subject, load) for name, subject, load in measurements.values if name in names)
        rows = [
            (subject, load, *(_number(measurements.median(name, subject, load)) for name in names))
            for subject, load in keys
        ]
        if title.startswith("Warm"):
            rows.sort(key=lambda row: row[1])
        if rows:
            parts.append(f"### {title}\n\n" + table(("of", "", *names), rows))
    if ratio_rows := list(ratios(measurements)):
        parts.append("### Peers relative to ours\n\n" + table(("what", "times"), ratio_rows))
    parts += verdicts(measurements, all_bars)
    return "\n\n".join(parts)


def _of(measurements: Measurements, metric: str) -> list[tuple[str, str, str]]:
    return [key for key in measurements.values if key[0] == metric]


def _number(value: float | None) -> str:
    if value is None:
        return ""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
