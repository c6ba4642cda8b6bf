"""`python -m tests.sandbox.attacks --level lsm --json`: the catalogue without pytest, for containers and others."""

import argparse
import asyncio
import json
import os
import sys
import time
from typing import Any

from openenv_core.sandbox import Isolation, Sandbox, SandboxConfig, SandboxUnavailable

from .catalogue import selected
from .play import Report, play
from .watch import percentile

CANNOT = 77
"""Exit status where the level cannot be had here."""


def main(arguments: list[str] | None = None) -> int:
    """Play the catalogue at one level and say what became of it."""
    parser = argparse.ArgumentParser(prog="attacks", description=__doc__)
    parser.add_argument("--level", type=Isolation, default=Isolation.NAMESPACES, choices=list(Isolation))
    parser.add_argument("--pattern", default="", help="only attacks whose category/name contains this")
    parser.add_argument("--together", type=int, default=1, help="attacks at a time")
    parser.add_argument("--quick", action="store_true", help="without those that take long")
    parser.add_argument("--preload", default="", help="modules, with commas")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    told = parser.parse_args(arguments)
    try:
        report, took = asyncio.run(_run(told))
    except SandboxUnavailable as error:
        sys.stderr.write(f"{error}\n")
        return CANNOT
    summary = summarised(report, took)
    sys.stdout.write(json.dumps(summary) + "\n" if told.json else _words(summary))
    return 1 if report.failures else 0


async def _run(told: argparse.Namespace) -> tuple[Report, float]:
    preload = tuple(filter(None, told.preload.split(",")))
    config = SandboxConfig(strongest=told.level, minimum=told.level, preload=preload)
    attacks = selected(told.level, slow=not told.quick, pattern=told.pattern)
    async with Sandbox(config) as sandbox:
        began = time.perf_counter()
        report = await play(sandbox, attacks, together=told.together, thorough=not told.quick)
        return report, time.perf_counter() - began


def summarised(report: Report, took_s: float) -> dict[str, Any]:
    """Return a report as plain values."""
    felt = report.felt
    worst = sorted(
        report.outcomes, key=lambda each: max(each.felt.neighbour, default=0.0) if each.felt else 0.0
    )
    return {
        "isolation": str(report.isolation),
        "uid": os.getuid(),
        "attacks": len(report.outcomes),
        "contained": sum(not each.breaches for each in report.outcomes),
        "failures": report.failures,
        "took_s": round(took_s, 2),
        "neighbour_ms": _distribution(felt.neighbour),
        "loop_ms": _distribution(felt.loop),
        "resident_mb": round(felt.resident / (1 << 20)),
        "slowest_s": {each.attack.title: round(each.took_s, 2) for each in _slowest(report)},
        "hardest_on_neighbours_ms": {
            each.attack.title: _distribution(each.felt.neighbour) for each in worst[-8:] if each.felt
        },
        "hardest_on_loop_ms": {
            each.attack.title: _distribution(each.felt.loop)
            for each in sorted(
                report.outcomes, key=lambda e: max(e.felt.loop, default=0.0) if e.felt else 0.0
            )[-8:]
            if each.felt
        },
    }


def _slowest(report: Report) -> list[Any]:
    return sorted(report.outcomes, key=lambda each: -each.took_s)[:40]


def _distribution(seconds: list[float]) -> dict[str, float]:
    figures = {"n": len(seconds)}
    for name, which in (("p50", 0.5), ("p99", 0.99), ("max", 1.0)):
        figures[name] = round(percentile(seconds, which) * 1000, 2)  # type: ignore[assignment]
    return figures  # type: ignore[return-value]


def _words(summary: dict[str, Any]) -> str:
    return "".join(f"{name}: {json.dumps(value, indent=1)}\n" for name, value in summary.items())


if __name__ == "__main__":
    sys.exit(main())
