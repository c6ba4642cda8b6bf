"""`python -m tests.sandbox.attacks --level lsm --json`: the catalogue without pytest, for containers and others."""

import argparse
import asyncio
import json
import os
import sys
import time
from typing import Any

from openenv_core.sandbox import Isolation, Sandbox, SandboxConfig, SandboxUnavailableError

from .catalogue import selected
from .play import play

CANNOT = 77
"""Exit status where the level cannot be had here."""


def main() -> int:
    """Play the catalogue at one level and say what became of it."""
    parser = argparse.ArgumentParser(prog="attacks", description=__doc__)
    parser.add_argument("--level", type=Isolation, default=Isolation.NAMESPACES, choices=list(Isolation))
    parser.add_argument("--pattern", default="", help="only attacks whose category/name contains this")
    parser.add_argument("--together", type=int, default=1, help="attacks at a time")
    parser.add_argument("--quick", action="store_true", help="without those that take long")
    parser.add_argument("--json", action="store_true", help="one JSON object in one line")
    arguments = parser.parse_args()
    try:
        summary = asyncio.run(_run(arguments))
    except SandboxUnavailableError as error:
        sys.stderr.write(f"{error}\n")
        return CANNOT
    sys.stdout.write(json.dumps(summary, indent=None if arguments.json else 1) + "\n")
    return 1 if summary["failures"] else 0


async def _run(arguments: argparse.Namespace) -> dict[str, Any]:
    attacks = selected(arguments.level, slow=not arguments.quick, pattern=arguments.pattern)
    async with Sandbox(SandboxConfig(strongest=arguments.level, minimum=arguments.level)) as sandbox:
        began = time.perf_counter()
        report = await play(sandbox, attacks, together=arguments.together, thorough=not arguments.quick)
    slowest = sorted(report.outcomes, key=lambda each: -each.took_s)[:10]
    return {
        "isolation": str(report.isolation),
        "uid": os.getuid(),
        "attacks": len(report.outcomes),
        "contained": sum(not each.breaches for each in report.outcomes),
        "failures": report.failures,
        "took_s": round(time.perf_counter() - began, 2),
        "p99_s": report.felt.p99_s,
        "slowest_s": {each.attack.title: round(each.took_s, 2) for each in slowest},
    }


if __name__ == "__main__":
    sys.exit(main())
