"""`scripts/gpu-check`: runs each check in a separate process, so that a crash or hang does not stop the others."""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from benchmarks.harness import INTERRUPTED, interrupt, table
from benchmarks.processes import kill, start

TAIL_LINES = 12
CHECKS = {
    "versions": (90, "torch, its CUDA, the driver, the card; matrix products and copies a second"),
    "step": (150, "loss and gradients of a tiny model, compared with a CPU's; the same in bfloat16"),
    "attention": (120, "attention by document, compared with one document at a time on a CPU"),
    "loss": (120, "peak memory of the last layer and its gradient, compared with the expected bytes"),
    "train-0.6B": (150, "tokens/s, MFU and memory of a training step at the shapes of Qwen3-0.6B"),
    "reload": (300, "vLLM's weights are replaced, awake and asleep; it then equals a fresh engine"),
    "decode-0.6B": (200, "vLLM's tokens/s at the shapes of Qwen3-0.6B"),
    "blackjack": (420, "a run of a few iterations with one card"),
    "weights-0.6B": (90, "weights from trainer to generator: seconds, GB/s, host memory"),
    "train-8B": (240, "the same step at the shapes of Qwen3-8B, with as many layers as fit"),
    "weights-8B": (240, "the same weights at the shapes of Qwen3-8B"),
    "decode-8B": (360, "vLLM's tokens/s at the shapes of Qwen3-8B"),
}
"""The checks in order, each with its time limit in seconds and a description."""


@dataclass(kw_only=True, slots=True)
class Outcome:
    """The result of a check.

    Attributes:
        check: Name of the check.
        status: passed; failed: a value is out of its bounds, or an error was raised; skipped; crashed; timed out.
        seconds: Duration.
        why: Reason why the check did not pass.
        figures: Measured values: `what`, `value`, `unit`, and for values with a bound `bar` and `met`.
    """

    check: str
    status: str = "skipped"
    seconds: float = 0.0
    why: str = ""
    figures: list[dict[str, Any]] = field(default_factory=list)


def run_check(name: str, *, dry: bool, seconds: float, logs: Path | None = None) -> Outcome:
    """Run a check, then kill all processes it has started. Its output is kept in `logs`."""
    outcome = Outcome(check=name)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        results, log = Path(folder) / "told.jsonl", (logs or Path(folder)) / f"{name}.log"
        command = [sys.executable, "-m", "benchmarks.gpu.child", name, str(results)]
        command += ["--dry"] if dry else []
        environment = {"TMPDIR": folder, **({"CUDA_VISIBLE_DEVICES": ""} if dry else {})}
        with log.open("w", encoding="utf-8") as output:
            status = _run(command, environment, output, seconds)
            for part in sorted(Path(folder).glob("*/check/logs/*.log")):  # of a run that did not end
                output.write(f"{part.stem}:\n{part.read_text(errors='replace')[-600:]}\n")
        rows = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
        tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]
    outcome.seconds = round(time.monotonic() - began, 1)
    ends = [row for row in rows if "status" in row]
    outcome.figures = [row for row in rows if "what" in row]
    if status is None:
        outcome.status = "timed out"
        outcome.why = f"after {seconds:.0f} s; it said last: " + " | ".join(tail[-3:])
    elif not ends:
        outcome.status, outcome.why = "crashed", f"exit status {status}:\n" + "\n".join(tail)
    else:
        outcome.status, outcome.why = ends[-1]["status"], ends[-1]["why"]
    return outcome


def _run(command: Sequence[str], environment: dict[str, str], output: IO[str], seconds: float) -> int | None:
    """Run a command and return its exit status; None if it timed out."""
    process = start(command, environment, stdout=output, stderr=output)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        kill(process)
        process.wait()


def format_result(row: dict[str, Any]) -> str:
    """Return a result as a line of text."""
    value = row["value"]
    if not isinstance(value, str):
        value = f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    bar = f"  ({row['bar']}: {'met' if row['met'] else 'NOT MET'})" if "bar" in row else ""
    return f"  {row['what']}: {value} {row['unit']}".rstrip() + bar


def _table(outcomes: Sequence[Outcome]) -> str:
    """Return a table with one line for each check."""
    rows = [(one.check, one.status, f"{one.seconds:.1f}", one.why.partition("\n")[0]) for one in outcomes]
    return table(("check", "outcome", "s", "why"), rows)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="./scripts/gpu-check",
        description="Checks a machine with a GPU: whether the CUDA stack computes correctly, and how fast.",
        epilog="""examples:
  ./scripts/gpu-check --json gpu.json
  ./scripts/gpu-check --only versions,step,attention
  ./scripts/gpu-check --dry        # the same code on the CPU, with tiny shapes
  PYTHON=/opt/env/bin/python ./scripts/gpu-check --minutes 10""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--only", metavar="NAME,NAME", help="run only these checks")
    add("--list", action="store_true", help="list the checks")
    add("--dry", action="store_true", help="on the CPU, with tiny shapes: shows that it runs, no more")
    add("--minutes", type=float, default=25.0, metavar="M", help="for all of them (%(default)g)")
    add("--json", type=Path, metavar="FILE", help="write all results to this file, after each check")
    add("--logs", type=Path, metavar="FOLDER", help="keep each check's output in this folder")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the checks; returns 0, 1 if one failed, crashed or timed out, 2 for a bad command line."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.list:
        for name, (seconds, about) in CHECKS.items():
            print(f"{name:<12} up to {seconds:>3} s: {about}")
        return 0
    # A dry run uses the same tiny shapes for every size; one of them is enough.
    names = [name for name in CHECKS if not (arguments.dry and name.endswith("8B"))]
    if arguments.only is not None:
        names = arguments.only.split(",")
    if unknown := [name for name in names if name not in CHECKS]:
        parser.error(f"expected --only with some of {', '.join(CHECKS)}, got {', '.join(unknown)}")
    signal.signal(signal.SIGTERM, interrupt)
    if arguments.logs is not None:
        arguments.logs.mkdir(parents=True, exist_ok=True)
    ends, outcomes = time.monotonic() + 60 * arguments.minutes, list[Outcome]()
    status = 0
    for name in names:
        seconds = min(CHECKS[name][0], ends - time.monotonic())
        if seconds <= 1:
            why = f"the {arguments.minutes:g} minutes are over (--minutes)"
            outcomes.append(Outcome(check=name, why=why))
            continue
        print(f"{name}: {CHECKS[name][1]} (up to {seconds:.0f} s)", flush=True)
        try:
            outcomes.append(run_check(name, dry=arguments.dry, seconds=seconds, logs=arguments.logs))
        except KeyboardInterrupt:
            print(f"{name}: interrupted; its processes are ended", flush=True)
            status = INTERRUPTED
            break
        outcome = outcomes[-1]
        end = f"  {outcome.status}. {outcome.why}".rstrip(". ")
        print("\n".join([*map(format_result, outcome.figures), end]), flush=True)
        _write(arguments.json, outcomes, dry=arguments.dry)
    print(f"\n{_table(outcomes)}")
    _write(arguments.json, outcomes, dry=arguments.dry)
    bad = any(outcome.status not in ("passed", "skipped") for outcome in outcomes)
    return status or int(bad or not any(outcome.status == "passed" for outcome in outcomes))


def _write(path: Path | None, outcomes: Sequence[Outcome], *, dry: bool) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        document = {"dry": dry, "checks": [asdict(outcome) for outcome in outcomes]}
        path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
