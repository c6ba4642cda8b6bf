"""The command `python -m benchmarks.faults`."""

import argparse
import itertools
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.commandline import INTERRUPTED, count, interrupt, progress
from benchmarks.faults.job import SMALL, Job
from benchmarks.faults.kills import KINDS, Killer
from benchmarks.faults.report import bars, report

ROOT = Path(__file__).resolve().parents[2]
GROUPS_AN_ITERATION = 64
END_TIMEOUT_S = 1800.0

_DESCRIPTION = """\
Fault tolerance of a training run of the BlackJack example with two generators, two rollout workers, a reward pool and
an environment server. Processes get SIGKILL at times drawn from a seed, each once the previous one has recovered.
Prints when each loss was noticed, when the replica served again, and the bars: the run ends by itself with every group
trained, none twice, and no process left."""

_EXAMPLES = """\
examples:
  python -m benchmarks.faults                          20 kills, about fifteen minutes on two cores
  python -m benchmarks.faults --kills 4 --iterations 40
  python -m benchmarks.faults --seed 7 --keep runs/faults --max-staleness 4"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run, kill, print; returns 0 if every bar is met, 1 if one is not, 130 on Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.faults",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kills", type=count, default=20, metavar="N", help="20 by default")
    parser.add_argument(
        "--iterations", type=count, default=600, metavar="N", help="of the run; 600 by default"
    )
    parser.add_argument(
        "--seed", type=int, default=1, metavar="N", help="seed of times and victims; 1 by default"
    )
    parser.add_argument("--max-staleness", type=int, default=1, metavar="N", help="of the run; 1 by default")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the run in this folder")
    arguments = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, interrupt)
    with tempfile.TemporaryDirectory(prefix="ropewalk-faults-") as scratch:
        folder = (arguments.keep or Path(scratch) / "run").absolute()
        job = Job(
            ROOT,
            folder,
            f"trainer.iterations={arguments.iterations}",
            f"rollout.max_staleness={arguments.max_staleness}",
            "reward.function=benchmarks.faults.rewards.compute_reward",
        )
        try:
            return _measure(job, arguments)
        except KeyboardInterrupt:
            progress("")
            print("interrupted; every process that was started is stopped")
            return INTERRUPTED
        finally:
            job.close()


def _measure(job: Job, arguments: argparse.Namespace) -> int:
    killer = Killer(job, arguments.seed, progress=progress)
    killer.all(list(itertools.islice(itertools.cycle(KINDS), arguments.kills)))
    progress("waiting for the run to end")
    status = job.wait(END_TIMEOUT_S)
    progress("")
    if status != 0:
        print(job.output()[-3000:])
    all_bars = list(
        bars(
            killer,
            wanted=arguments.kills,
            trained=job.trained(),
            groups=arguments.iterations * GROUPS_AN_ITERATION,
            left=len(job.find_leftovers()),
        )
    )
    print(f"seed {arguments.seed}, {arguments.iterations} iterations; {' '.join(SMALL)}\n")
    print(report(killer, all_bars, job.account() if status == 0 else {}))
    return 0 if all(bar.met for bar in all_bars) else 1


if __name__ == "__main__":
    sys.exit(main())
