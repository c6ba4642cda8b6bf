"""`ropewalk top`: what servers do, live, as their /metrics tell it."""

import argparse
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from openenv_core.cli import Command
from openenv_core.errors import ConfigurationError, installed_with
from openenv_core.protocol.http import redact_url

if TYPE_CHECKING:
    import httpx
    from rich.table import Table

TIMEOUT_S: Final = 5.0
DEFAULT_INTERVAL_S: Final = 2.0
_FAILED: Final = 1


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `top`."""
    told = "servers, by default http://127.0.0.1:8000; any worker of a fleet answers for all"
    parser.add_argument("urls", nargs="*", metavar="URL", help=told)
    told = "between two looks (%(default)g)"
    parser.add_argument("--interval", type=float, default=DEFAULT_INTERVAL_S, metavar="SECONDS", help=told)
    told = "look twice, print what went on between, and end; status 1 where a server does not answer"
    parser.add_argument("--once", action="store_true", help=told)
    told = "print a line of JSON a server and interval, until Ctrl-C or with --once"
    parser.add_argument("--json", action="store_true", help=told)
    parser.add_argument("--token", help="bearer token of the servers; prefer ROPEWALK_TOKEN")


def run(arguments: argparse.Namespace) -> int:
    """Look until Ctrl-C, or once.

    Raises:
        ConfigurationError: The interval or a URL cannot be, or packages are missing.
    """
    if not 0 < arguments.interval < float("inf"):
        raise ConfigurationError(f"expected --interval of seconds above 0, got {arguments.interval:g}")
    from openenv_core.client.settings import http_url
    from openenv_core.proxies import client_for

    urls = [http_url(url) for url in arguments.urls or ["http://127.0.0.1:8000"]]
    token = arguments.token or os.environ.get("ROPEWALK_TOKEN")
    with ExitStack() as stack:
        clients = [stack.enter_context(client_for(url, token)) for url in urls]
        show: Callable[..., None] = partial(print, flush=True)
        if not arguments.json:
            with installed_with("author", "rich for a table", "rich"):
                from rich.console import Console
                from rich.live import Live
            if arguments.once:
                show = Console().print
            else:
                live = Live("looking ...", screen=True, auto_refresh=False)
                show = partial(stack.enter_context(live).update, refresh=True)
        looks = list(map(look, clients, urls))
        while True:
            time.sleep(arguments.interval)
            before, looks = looks, list(map(look, clients, urls))
            told = [figures(*pair) for pair in zip(before, looks, strict=True)]
            if arguments.json:
                for one in told:
                    show(json.dumps(one))
            else:
                show(_table(told))
            if arguments.once:
                return _FAILED if any("error" in one for one in told) else 0


@dataclass(frozen=True, slots=True)
class Look:
    """What a server told at one moment.

    Attributes:
        url: Where.
        at: When, by `time.monotonic`.
        samples: By their names and their labels, sorted, but for the environment's.
        environment: What it serves.
        error: Why there is nothing.
    """

    url: str
    at: float
    samples: Mapping[tuple[str, ...], float]
    environment: str = ""
    error: str = ""

    def of(self, name: str) -> dict[str, float]:
        """Return the samples of one name by their only label."""
        return {key[1]: value for key, value in self.samples.items() if key[0] == name and len(key) == 2}


def look(client: "httpx.Client", url: str) -> Look:
    """Ask a server for its metrics; what goes wrong is told in the result."""
    import httpx

    with installed_with("server", "prometheus-client, to read metrics", "prometheus_client"):
        from prometheus_client.parser import text_string_to_metric_families
    at = time.monotonic()
    try:
        reply = client.get(f"{url}/metrics", timeout=TIMEOUT_S)
        if reply.status_code != 200:
            remedy = {401: "; give its --token", 404: "; is it a server of Ropewalk's with metrics on?"}
            text = f"expected its metrics, got HTTP {reply.status_code}{remedy.get(reply.status_code, '')}"
            return Look(url, at, {}, error=text)
        samples: dict[tuple[str, ...], float] = {}
        environment = ""
        for family in text_string_to_metric_families(reply.text):
            for sample in family.samples:
                labels = dict(sample.labels)
                environment = labels.pop("environment", environment)
                samples[sample.name, *(labels[name] for name in sorted(labels))] = sample.value
    except httpx.HTTPError as error:
        return Look(url, at, {}, error=str(error) or type(error).__name__)
    except ValueError as error:
        return Look(url, at, {}, error=f"expected metrics in Prometheus's format, got: {error}"[:200])
    return Look(url, at, samples, environment)


def figures(before: Look, now: Look) -> dict[str, Any]:
    """Return what is told of the time between two looks at one server.

    What only grows has begun anew where it has shrunk: the server was started again.
    """
    url = redact_url(now.url)
    if now.error:
        return {"url": url, "error": now.error}
    seconds = max(now.at - before.at, 1e-9)

    def grown(*key: str) -> float:
        value, former = now.samples.get(key, 0.0), before.samples.get(key, 0.0)
        return value - former if value >= former else value

    steps = grown("ropewalk_call_seconds_count", "step")
    there, here = (grown(f"ropewalk_{name}_seconds_total", "step") for name in ("environment", "server"))
    buckets = [
        (float(key[2]), grown(*key))
        for key in now.samples
        if key[:2] == ("ropewalk_call_seconds_bucket", "step")
    ]
    codes = {code: grown("ropewalk_errors_total", code) / seconds for code in now.of("ropewalk_errors_total")}
    taken = now.of("ropewalk_slots_in_use")
    return {
        "url": url,
        "environment": now.environment,
        "slots": int(now.samples.get(("ropewalk_slots",), 0)),
        "in_use": int(sum(taken.values())),
        "waiting": int(now.samples.get(("ropewalk_queue_waiting",), 0)),
        "steps_per_s": round(steps / seconds, 3),
        "resets_per_s": round(grown("ropewalk_call_seconds_count", "reset") / seconds, 3),
        "step_p50_s": quantile(buckets, 0.5),
        "step_p99_s": quantile(buckets, 0.99),
        "environment_share": round(there / (there + here), 3) if there + here > 0 else None,
        "errors_per_s": {code: round(rate, 3) for code, rate in codes.items() if rate},
        "received_bytes_per_s": round(grown("ropewalk_received_bytes_total") / seconds),
        "sent_bytes_per_s": round(grown("ropewalk_sent_bytes_total") / seconds),
        "workers": [
            {
                "in_use": int(value),
                "steps_per_s": round(grown("ropewalk_worker_steps_total", worker) / seconds, 3),
            }
            for worker, value in sorted(taken.items(), key=lambda item: int(item[0]))
        ],
    }


def quantile(buckets: Sequence[tuple[float, float]], share: float) -> float | None:
    """Return the time that a share of a histogram's calls stayed within; None without calls.

    Args:
        buckets: Upper bounds, the last of them infinite, with how many calls stayed within.
        share: Between 0 and 1. Within a bucket calls are taken to be spread evenly, as Prometheus's
            `histogram_quantile` does.
    """
    if not buckets or not buckets[-1][1]:
        return None
    rank, low, below = share * buckets[-1][1], 0.0, 0.0
    for bound, count in buckets:
        if count >= rank:
            return low if bound == float("inf") else low + (bound - low) * (rank - below) / (count - below)
        low, below = bound, count
    return low


def _table(told: Sequence[Mapping[str, Any]]) -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"ropewalk top  {time.strftime('%H:%M:%S')}", title_justify="left")
    headings = "server,>slots,>waiting,>steps/s,>resets/s,>p50,>p99,>in environment,>in/s,>out/s,errors/s"
    for heading in headings.split(","):
        table.add_column(
            heading.lstrip(">"), justify="right" if heading[0] == ">" else "left", overflow="fold"
        )
    for one in told:
        if "error" in one:
            table.add_row(Text(one["url"]), Text(one["error"], "yellow"))
            continue
        share = one["environment_share"]
        row = (
            f"{one['environment']} {one['url']}",
            f"{one['in_use']}/{one['slots']}",
            f"{one['waiting']}",
            f"{one['steps_per_s']:,.1f}",
            f"{one['resets_per_s']:,.1f}",
            _seconds(one["step_p50_s"]),
            _seconds(one["step_p99_s"]),
            "-" if share is None else f"{share:.0%}",
            _bytes(one["received_bytes_per_s"]),
            _bytes(one["sent_bytes_per_s"]),
            ", ".join(f"{code} {rate:g}" for code, rate in one["errors_per_s"].items()),
        )
        table.add_row(*map(Text, row))
        if len(one["workers"]) > 1:
            for number, worker in enumerate(one["workers"]):
                of_worker = (f"  worker {number}", f"{worker['in_use']}", "", f"{worker['steps_per_s']:,.1f}")
                table.add_row(*map(Text, of_worker), style="dim")
    return table


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f} s" if value >= 1 else f"{1e3 * value:.3g} ms"


def _bytes(value: float) -> str:
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} GB"


COMMAND = Command(
    name="top",
    help="show what servers do, live: sessions, steps, latency, errors",
    configure=configure,
    run=run,
    examples=(
        "ropewalk top",
        "ropewalk top http://10.0.0.1:8000 http://10.0.0.2:8000 --interval 5",
        "ropewalk top --once --json | jq .steps_per_s",
    ),
)
