"""The command `python -m benchmarks.containers`."""

import argparse
import platform
import signal
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.commandline import count, interrupt, progress, write
from benchmarks.containers import measures
from benchmarks.containers.contestants import BenchError
from benchmarks.containers.report import bars, report
from benchmarks.containers.servers import PLAIN, PLAIN_SUBJECT, PORT, Subject
from benchmarks.wire.figures import Figures
from openenv_core.errors import OpenEnvError
from openenv_core.providers.docker import Engine

INTERRUPTED = 130
FAILED = 2

_DESCRIPTION = """\
What a container costs until its server is healthy: by `docker run` and a look at /health, and by ours, in alternating
rounds; and how long a warm pool takes to hand one out. Needs a Docker engine. Prints medians and the bars."""

_EXAMPLES = """\
examples:
  python -m benchmarks.containers                                about two minutes
  python -m benchmarks.containers --quick                        does it run?
  python -m benchmarks.containers --image my-env:latest          another image beside the plain one
  python -m benchmarks.containers --json out.json                every round's figures into a file"""


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print what there is, and return the exit status: 0, or 2 where something did not work."""
    arguments = _parser().parse_args(words)
    figures = Figures()
    signal.signal(signal.SIGTERM, interrupt)
    rounds, leases = (1, 2) if arguments.quick else (arguments.rounds, arguments.leases)
    status = 0
    try:
        for subject in _subjects(arguments, figures):
            measures.cold(subject, rounds, figures, progress)
            measures.pool(subject, leases, arguments.size, figures, progress)
    except KeyboardInterrupt:
        status = INTERRUPTED
        figures.notes.append("the rest: interrupted; every container that was started is removed")
    except (BenchError, OpenEnvError) as error:
        status = FAILED
        figures.notes.append(f"the rest: {error}")
    progress("")
    held = list(bars(figures))
    print(f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, Python {platform.python_version()}, {rounds} rounds\n")
    print(report(figures, held))
    write(arguments.json, figures, held)
    return status


def _subjects(arguments: argparse.Namespace, figures: Figures) -> list[Subject]:
    """Return what can be measured, and note what cannot."""
    engine = Engine.find()
    engine.ping()
    wanted = [PLAIN_SUBJECT, *(Subject(image, port=arguments.port) for image in arguments.image)]
    missing = [subject for subject in wanted if not engine.has_image(subject.image)]
    for subject in missing:
        figures.notes.append(f"{subject.image}: the engine has no such image; build or pull it first")
    return [subject for subject in wanted if subject not in missing]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.containers",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--image", action="append", default=[], metavar="NAME", help=f"an image to measure beside {PLAIN}")
    add("--port", type=count, default=PORT, metavar="N", help="where those listen inside (%(default)s)")
    add("--rounds", type=count, default=15, metavar="N", help="cold starts of each kind (%(default)s)")
    add("--leases", type=count, default=20, metavar="N", help="containers taken from the pool (%(default)s)")
    add("--size", type=count, default=4, metavar="N", help="of the pool (%(default)s)")
    add("--quick", action="store_true", help="tiny numbers: shows that it runs, no more")
    add("--json", type=Path, metavar="FILE", help="write every round's figures there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
