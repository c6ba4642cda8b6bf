"""`ropewalk top`: show the activity of servers and training runs live, from their /metrics."""

import argparse
import os
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from openenv_core.cli import Command
from openenv_core.cli.command import sanitize
from openenv_core.errors import ConfigurationError, installed_with
from openenv_core.protocol.http import redact_url

if TYPE_CHECKING:
    import httpx

TIMEOUT_S: Final = 5.0
MAX_BYTES: Final = 8 * 1024 * 1024
DEFAULT_URL: Final = "http://127.0.0.1:8000"
DEFAULT_INTERVAL_S: Final = 2.0
_FAILED: Final = 1
_DUMB: Final = ("dumb", "unknown")
"""Values of TERM for terminals without a cursor to move, on which a table that is updated would show nothing."""

Row = dict[str, str]
"""The cells of one server, worker or run, by heading."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `top`."""
    text = f"URLs of servers, any worker of which answers for all, and of training runs ({DEFAULT_URL})"
    parser.add_argument("urls", nargs="*", default=[DEFAULT_URL], metavar="URL", help=text)
    text = "interval of updates (%(default)g)"
    parser.add_argument("--interval", type=float, default=DEFAULT_INTERVAL_S, metavar="SECONDS", help=text)
    text = "print one interval and exit, with status 1 if a server or run does not answer"
    parser.add_argument("--once", action="store_true", help=text)


def run(arguments: argparse.Namespace) -> int:
    """Show the metrics until Ctrl-C, or once: as tables in a terminal, otherwise as lines.

    Without a terminal it ends with status 1 if no server or run answers at first.

    Raises:
        ConfigurationError: The interval or a URL is invalid, or packages are missing.
    """
    if not 0 < arguments.interval < float("inf"):
        raise ConfigurationError(f"expected --interval of seconds above 0, got {arguments.interval:g}")
    from openenv_core.protocol.http import http_url
    from openenv_core.proxies import client_for

    urls = [http_url(url) for url in arguments.urls]
    token = os.environ.get("ROPEWALK_TOKEN")
    with ExitStack() as stack:
        clients = [stack.enter_context(client_for(url, token)) for url in urls]
        pool = stack.enter_context(ThreadPoolExecutor(len(urls)))
        live = None
        if sys.stdout.isatty() and os.environ.get("TERM") not in _DUMB and not arguments.once:
            with installed_with("author", "rich for a table", "rich"):
                from rich.live import Live
                from rich.text import Text
            live = stack.enter_context(Live("waiting ...", screen=True, auto_refresh=False))
        scrapes = list(pool.map(scrape, clients, urls))
        answered = False
        while True:
            time.sleep(arguments.interval)
            before, scrapes = scrapes, list(pool.map(scrape, clients, urls))
            rows = [
                {heading: sanitize(value).replace("\n", " ") for heading, value in row.items()}
                for pair in zip(before, scrapes, strict=True)
                for row in rows_of(*pair)
            ]
            if live is not None:
                lines = [time.strftime("%H:%M:%S"), *lines_of(rows, live.console.width)]
                live.update(Text("\n".join(lines)), refresh=True)
            else:
                for row in rows:
                    line = ", ".join(f"{heading} {value}" for heading, value in row.items() if value)
                    print(time.strftime("%H:%M:%S"), line, flush=True)
            if arguments.once:
                return _FAILED if any(scrape.error for scrape in scrapes) else 0
            answered = answered or not all(scrape.error for scrape in (*before, *scrapes))
            if live is None and not answered:
                return _FAILED  # nobody watches who could start a server or correct a URL


@dataclass(frozen=True, slots=True)
class Scrape:
    """The metrics of a server or run at one moment.

    Attributes:
        url: The URL of the server or run.
        at: When they were requested, by `time.monotonic`.
        samples: Values by metric name and label values, sorted by label, without the environment's or run's name.
        name: The environment's or run's name.
        error: Why there are no metrics; empty if there are.
    """

    url: str
    at: float
    samples: Mapping[tuple[str, ...], float]
    name: str = ""
    error: str = ""

    def of(self, name: str) -> dict[str, float]:
        """Return the samples of a metric by the value of its only label."""
        return {key[1]: value for key, value in self.samples.items() if key[0] == name}


def scrape(client: "httpx.Client", url: str) -> Scrape:
    """Request the metrics; an error is part of the result."""
    import httpx

    with installed_with("server", "prometheus-client, to read metrics", "prometheus_client"):
        from prometheus_client.parser import text_string_to_metric_families
    at = time.monotonic()
    body = b""
    try:
        with client.stream("GET", f"{url}/metrics", timeout=TIMEOUT_S) as reply:
            for chunk in reply.iter_bytes():
                body += chunk
                if len(body) > MAX_BYTES or time.monotonic() > at + TIMEOUT_S:
                    text = f"expected metrics of at most {MAX_BYTES} bytes within {TIMEOUT_S:g} s, got more"
                    return Scrape(url, at, {}, error=text)
        if reply.status_code != 200:
            remedy = {
                401: "; give its token in ROPEWALK_TOKEN",
                404: "; is it a server of Ropewalk's with metrics on?",
            }
            text = f"expected its metrics, got HTTP {reply.status_code}{remedy.get(reply.status_code, '')}"
            return Scrape(url, at, {}, error=text)
        samples: dict[tuple[str, ...], float] = {}
        name = ""
        for family in text_string_to_metric_families(body.decode()):
            for sample in family.samples if family.name.startswith("ropewalk_") else ():
                labels = dict(sample.labels)
                name = labels.pop("environment", "") or labels.pop("run", name)
                samples[sample.name, *(labels[label] for label in sorted(labels))] = sample.value
    except httpx.HTTPError as error:
        return Scrape(url, at, {}, error=str(error) or type(error).__name__)
    except ValueError as error:
        return Scrape(url, at, {}, error=f"expected metrics in Prometheus's format, got: {error}"[:200])
    known = ("ropewalk_slots",) in samples or ("ropewalk_run_version",) in samples
    return Scrape(url, at, samples, name, "" if known else "expected metrics of Ropewalk's, got others")


def rows_of(before: Scrape, now: Scrape) -> list[Row]:
    """Return the rows for the time between two scrapes: of a run, or of a server and its workers."""
    where = redact_url(now.url)
    if now.error:
        return [{"server": where, "error": now.error}]
    samples, where = now.samples, f"{now.name} {where}"
    if ("ropewalk_run_version",) in samples:
        groups = now.of("ropewalk_run_groups").items()
        reward = samples.get(("ropewalk_run_metric", "reward/mean"))
        return [
            {
                "run": where,
                "trained": f"{samples['ropewalk_run_version',]:g}/{samples['ropewalk_run_iterations',]:g}",
                "served": f"{samples['ropewalk_run_served_version',]:g}",
                "groups": " ".join(f"{state} {count:g}" for state, count in groups),
                "calls": f"{sum(now.of('ropewalk_run_calls_in_flight').values()):g}",
                "restarts": f"{sum(now.of('ropewalk_run_restarts_total').values()):g}",
                "reward/mean": "-" if reward is None else f"{reward:g}",
            }
        ]
    seconds = max(now.at - before.at, 1e-9)

    def growth_of(*key: str) -> float:
        """Return a counter's increase between the scrapes; a restarted server has begun at zero."""
        value = samples.get(key, 0.0)
        previous = value if before.error else before.samples.get(key, 0.0)
        return value - previous if value >= previous else value

    environment_s, server_s = (
        growth_of(f"ropewalk_{name}_seconds_total", "step") for name in ("environment", "server")
    )
    bucket = ("ropewalk_call_seconds_bucket", "step")
    buckets = [(float(key[2]), growth_of(*key)) for key in samples if key[:2] == bucket]
    errors = {code: growth_of("ropewalk_errors_total", code) for code in now.of("ropewalk_errors_total")}
    slots_in_use = now.of("ropewalk_slots_in_use")
    row = {
        "server": where,
        "slots": f"{sum(slots_in_use.values()):g}/{samples['ropewalk_slots',]:g}",
        "waiting": f"{samples['ropewalk_queue_waiting',]:g}",
        "steps/s": f"{growth_of('ropewalk_call_seconds_count', 'step') / seconds:.1f}",
        "resets/s": f"{growth_of('ropewalk_call_seconds_count', 'reset') / seconds:.1f}",
        "p50": _milliseconds(quantile(buckets, 0.5)),
        "p99": _milliseconds(quantile(buckets, 0.99)),
        "in environment": f"{environment_s / (environment_s + server_s):.0%}"
        if environment_s + server_s > 0
        else "-",
        "in/s": _bytes(growth_of("ropewalk_received_bytes_total") / seconds),
        "out/s": _bytes(growth_of("ropewalk_sent_bytes_total") / seconds),
        "errors/s": " ".join(f"{code} {count / seconds:.3g}" for code, count in errors.items() if count),
    }
    workers = [
        {
            "server": f"{where} worker {worker}",
            "slots": f"{slots:g}",
            "steps/s": f"{growth_of('ropewalk_worker_steps_total', worker) / seconds:.1f}",
        }
        for worker, slots in sorted(slots_in_use.items(), key=lambda item: int(item[0]))
    ]
    return [row, *(workers if len(workers) > 1 else ())]


def quantile(buckets: Sequence[tuple[float, float]], fraction: float) -> float | None:
    """Return a quantile of a histogram in the unit of its bounds; None without observations.

    Observations are assumed to be spread evenly within a bucket, as in Prometheus's `histogram_quantile`.

    Args:
        buckets: Upper bounds, the last one infinite, with cumulative counts.
        fraction: The quantile, between 0 and 1.
    """
    if not buckets or not buckets[-1][1]:
        return None
    rank, low, below = fraction * buckets[-1][1], 0.0, 0.0
    for bound, count in buckets:
        if count >= rank:
            return low if bound == float("inf") else low + (bound - low) * (rank - below) / (count - below)
        low, below = bound, count
    return low


def lines_of(rows: Sequence[Row], width: int) -> list[str]:
    """Return rows as the lines of tables, one each for servers, runs and errors; as blocks if a table is too wide."""
    from openenv_core.evaluation.records import table_lines

    kinds: dict[str, list[Row]] = {}
    for row in rows:
        kinds.setdefault("error" if "error" in row else next(iter(row)), []).append(row)
    shown: list[str] = []
    for alike in kinds.values():
        columns = list(alike[0])
        lines = list(table_lines(columns, ([row.get(name, "") for name in columns] for row in alike)))
        fits = max(map(len, lines)) <= width
        shown += [*(lines if fits else (_as_block(row, width) for row in alike)), ""]
    return shown


def _as_block(row: Row, width: int) -> str:
    """Return a row as lines: its first cell, and below it the others with their headings, kept whole if they fit."""
    title, *cells = row.items()
    pieces = [f"{heading} {value}" for heading, value in cells if value]
    unbroken = [piece.replace(" ", "\u00a0") if len(piece) + 2 <= width else piece for piece in pieces]
    lines = textwrap.wrap(
        "   ".join(unbroken),
        max(width, 20),
        initial_indent="  ",
        subsequent_indent="  ",
        break_on_hyphens=False,
    )
    return "\n".join([title[1], *lines]).replace("\u00a0", " ")


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.3g} ms"


def _bytes(value: float) -> str:
    return f"{value:.0f} B" if value < 1000 else f"{value / 1000:,.1f} kB"


COMMAND = Command(
    name="top",
    help="show what servers do, live: sessions, steps, latency, errors",
    configure=configure,
    run=run,
    examples=(
        "ropewalk top",
        "ropewalk top http://10.0.0.1:8000 http://10.0.0.2:8000 --interval 5",
        "ropewalk top --once | grep errors/s",
    ),
)
