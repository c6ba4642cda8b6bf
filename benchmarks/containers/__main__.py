"""The command `python -m benchmarks.containers`."""

import argparse
import sys
from collections.abc import Sequence

from benchmarks import commandline
from benchmarks.commandline import count, heading, progress, run_measurement, write
from benchmarks.containers import measures
from benchmarks.containers.contestants import BenchError
from benchmarks.containers.report import bars, report
from benchmarks.containers.servers import PLAIN, PLAIN_SUBJECT, PORT, Subject
from benchmarks.wire.measurements import Measurements
from openenv_core.errors import OpenEnvError
from openenv_core.providers.docker import DockerEngine

_DESCRIPTION = """\
The time until a container's server is healthy, with `docker run` and polls of /health and with our provider, in
alternating rounds; and the time to lease one from a warm pool. Needs a Docker engine. Prints medians and the bars."""

_EXAMPLES = """\
examples:
  python -m benchmarks.containers                                about two minutes
  python -m benchmarks.containers --quick                        does it run?
  python -m benchmarks.containers --image my-env:latest          also another image
  python -m benchmarks.containers --json out.json                every round's figures into a file"""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the report, and return the exit status: 0, or 2 where a measurement failed."""
    arguments = _parser().parse_args(argv)
    rounds, leases = (1, 2) if arguments.quick else (arguments.rounds, arguments.leases)

    def measure(measurements: Measurements) -> None:
        for subject in _subjects(arguments, measurements):
            measures.measure_cold_starts(subject, rounds, measurements, progress)
            measures.measure_pool(subject, leases, arguments.size, measurements, progress)

    measurements, status = run_measurement(
        measure, BenchError, OpenEnvError, interrupted="every container that was started is removed"
    )
    all_bars = list(bars(measurements))
    print(heading(f"{rounds} rounds"))
    print(report(measurements, all_bars))
    write(arguments.json, measurements, all_bars)
    return status


def _subjects(arguments: argparse.Namespace, measurements: Measurements) -> list[Subject]:
    """Return what can be measured, and note what cannot."""
    engine = DockerEngine.find()
    engine.ping()
    wanted = [PLAIN_SUBJECT, *(Subject(image, port=arguments.port) for image in arguments.image)]
    missing = [subject for subject in wanted if not engine.has_image(subject.image)]
    for subject in missing:
        measurements.notes.append(f"{subject.image}: the engine has no such image; build or pull it first")
    return [subject for subject in wanted if subject not in missing]


def _parser() -> argparse.ArgumentParser:
    parser = commandline.create_parser("containers", _DESCRIPTION, _EXAMPLES)
    add = parser.add_argument
    add("--image", action="append", default=[], metavar="NAME", help=f"image to measure besides {PLAIN}")
    add("--port", type=count, default=PORT, metavar="N", help="port of those images (%(default)s)")
    add("--rounds", type=count, default=15, metavar="N", help="cold starts of each kind (%(default)s)")
    add("--leases", type=count, default=20, metavar="N", help="containers taken from the pool (%(default)s)")
    add("--size", type=count, default=4, metavar="N", help="size of the pool (%(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
