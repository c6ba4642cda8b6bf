"""The command `python -m benchmarks.sandbox`."""

import argparse
import platform
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.commandline import INTERRUPTED, choices, count, interrupt, progress, write
from benchmarks.sandbox import measures, peers
from benchmarks.sandbox.plan import PRELOADS, SECTIONS, Plan
from benchmarks.sandbox.report import bars, report
from benchmarks.wire.measurements import Measurements
from benchmarks.wire.processes import StartError
from openenv_core.sandbox.config import LADDER

FAILED = 2
MISSED = 1

_DESCRIPTION = """\
The cost of an interpreter for untrusted code, at every level of isolation available on this machine, compared with a
Jupyter kernel and a container engine. Prints medians of alternating rounds and the bars."""

_EXAMPLES = """\
examples:
  python -m benchmarks.sandbox                                 everything: about ten minutes
  python -m benchmarks.sandbox --quick                         does it run? about half a minute
  python -m benchmarks.sandbox --only start,execute --rounds 3
  python -m benchmarks.sandbox --only memory --live 100 --levels lsm
  python -m benchmarks.sandbox --only abandon --check          1,000 sessions, every one reclaimed?
  python -m benchmarks.sandbox --preload none,numpy+matplotlib.pyplot
  python -m benchmarks.sandbox --json out.json                 every round's figures into a file

sections:
  start       start of a session, a Jupyter kernel, a container
  burst       100 sessions at once, each to its first result; also docker run, bubblewrap and nsjail
  execute     execution in a running session: directly, through the WebSocket, in a kernel, in a container
  throughput  executions of many sessions of one server at once
  memory      memory of many sessions at once
  loops       pure Python, inside and outside the sandbox
  abandon     sessions whose client is killed: is everything reclaimed?

Levels that are not available are noted and left out. Containers need an engine: scripts/docker-engine start."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the report, and return the exit status: 0, 2 on failure, 1 if `--check` finds an unmet bar."""
    arguments = _parser().parse_args(argv)
    measurements = Measurements()
    signal.signal(signal.SIGTERM, interrupt)
    status = 0
    plan = _plan(arguments, measurements)
    try:
        plan = measures.with_available_levels(plan, measurements, progress)
        for section in plan.sections:
            try:
                getattr(measures, section)(plan, measurements, progress)
            except StartError as error:
                status = FAILED
                measurements.notes.append(f"the rest of {section}: {error}")
    except KeyboardInterrupt:
        status = INTERRUPTED
        measurements.notes.append("the rest: interrupted; everything that was started is stopped")
    progress("")
    all_bars = list(bars(measurements))
    about = f"Python {platform.python_version()}, {platform.release()}, {plan.rounds} rounds"
    print(f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {about}\n")
    print(report(measurements, all_bars))
    write(arguments.json, measurements, all_bars)
    if arguments.check and not all(bar.met for bar in all_bars):
        status = status or MISSED
    return status


def _plan(arguments: argparse.Namespace, measurements: Measurements) -> Plan:
    """Return the plan for this machine, and note what cannot be measured."""
    plan = Plan(sections=arguments.only or SECTIONS)
    if arguments.quick:
        plan = plan.quick()
    chosen = {
        name: value
        for name in ("rounds", "levels", "preloads", "live", "abandoned")
        if (value := getattr(arguments, name)) is not None
    }
    plan = replace(plan, **chosen)
    if arguments.no_peers or not {"start", "burst", "execute"} & set(plan.sections):
        return plan
    python = peers.jupyter_python(arguments.jupyter_python)
    for reason in (no_jupyter := peers.no_jupyter(python), no_engine := peers.no_engine(arguments.image)):
        if reason is not None:
            measurements.notes.append(reason)
            print(f"benchmarks.sandbox: going on without {reason}", file=sys.stderr)
    jupyter, image = None if no_jupyter else python, None if no_engine else arguments.image
    return replace(plan, jupyter=jupyter, image=image, jails=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sandbox",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--only", type=choices(SECTIONS), metavar="SECTION,...", help=f"of {', '.join(SECTIONS)}")
    levels = tuple(map(str, LADDER))
    add("--levels", type=choices(levels), metavar="LEVEL,...", help=f"of {', '.join(levels)}")
    add(
        "--preload",
        dest="preloads",
        type=_module_names,
        metavar="MODULE+...,...",
        help=f"sets of modules that interpreters import in advance ({','.join(PRELOADS)})",
    )
    add("--rounds", type=count, metavar="N", help="5 by default")
    add("--live", type=count, metavar="N", help="sessions whose memory is measured; 500 by default")
    add("--abandoned", type=count, metavar="N", help="sessions to abandon; 1000 by default")
    add("--quick", action="store_true", help="tiny numbers: shows that it runs, no more")
    add(
        "--no-peers",
        action="store_true",
        help="leave out the Jupyter kernel, the container engine and the jails",
    )
    add(
        "--jupyter-python",
        type=Path,
        metavar="PATH",
        help="interpreter of an installation with ipykernel and jupyter_client "
        f"({peers.JUPYTER_VARIABLE}, or .venvs/jupyter/bin/python)",
    )
    add("--image", default=peers.IMAGE, metavar="NAME", help="image of the containers (%(default)s)")
    add("--check", action="store_true", help=f"exit with {MISSED} if a bar is not met")
    add("--json", type=Path, metavar="FILE", help="write every round's figures there")
    return parser


def _module_names(text: str) -> tuple[str, ...]:
    names = tuple(text.replace(",", " ").split())
    if not names or not all(
        component.replace(".", "a").isidentifier() for name in names for component in name.split("+")
    ):
        raise argparse.ArgumentTypeError(f"expected names of modules, got {text!r}")
    return names


if __name__ == "__main__":
    sys.exit(main())
