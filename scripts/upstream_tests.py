"""Runs the released package's own tests against Ropewalk, and compares the outcomes with the expected ones.

    python scripts/upstream_tests.py CHECKOUT                       # of https://github.com/huggingface/OpenEnv
    python scripts/upstream_tests.py CHECKOUT --released PYTHON     # with the released package, which that Python has

Needs an environment with Ropewalk and the packages that the tests import (docs/compatibility.md). A copy of the
checkout without its `src` is tested, each file in a process of its own. `upstream_tests.txt` lists what is expected:
the commit, how many tests pass, and each test that does not, with its reason.
"""

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

FOLDERS: Final = ("tests/core", "tests/test_core", "tests/envs")
EXPECTED: Final = Path(__file__).with_suffix(".txt")
FILE_TIMEOUT_S: Final = 600
PASSED: Final = "passed"

REASONS: Final = {
    "installer": "private modules with the released ways to find, fetch and install environments (openenv.auto._*)",
    "private": "private attributes of the released classes, what its modules import, its distribution's version",
    "refused": "refused on purpose: an agent's code inside the server",
    "released": "does not pass with the released package either",
}
"""Why a test does not pass. The last one is no difference between the two packages."""


def main() -> int:
    """Run the tests; return 0 if all outcomes are the expected ones."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, help="a checkout of the released package's repository")
    parser.add_argument("--released", metavar="PYTHON", help="run them with the released package instead")
    parser.add_argument("--only", default="", metavar="TEXT", help="only files whose path contains this")
    parser.add_argument("--outcomes", type=Path, metavar="FILE", help="write every outcome here")
    arguments = parser.parse_args()
    if not all((arguments.checkout / folder).is_dir() for folder in FOLDERS):
        parser.error(
            f"{arguments.checkout} has no {', '.join(FOLDERS)}; give a checkout of huggingface/OpenEnv"
        )
    with tempfile.TemporaryDirectory(prefix="upstream-tests-") as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(
            arguments.checkout,
            tree,
            ignore=lambda place, _: {".git", "src"} if Path(place) == arguments.checkout else (),
        )
        python = Path(arguments.released) if arguments.released else make_environment(Path(folder) / "env")
        outcomes = dict(run_all(python, tree, arguments.only))
    if arguments.outcomes:
        arguments.outcomes.write_text(
            "".join(f"{outcome}\t{name}\n" for name, outcome in sorted(outcomes.items()))
        )
    counts = Counter(outcomes.values())
    print(", ".join(f"{count:,} {outcome}" for outcome, count in counts.most_common()))
    if arguments.released or arguments.only:
        return 0
    return compare(outcomes, *read_expected())


def make_environment(folder: Path) -> Path:
    """Return the Python of an environment like this one in which the released names are ours.

    PYTHONPATH, as set by `python -m openenv_core.compat`, would not do: some tests start servers with their own.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    import openenv_core.compat

    hook = Path(openenv_core.compat.__file__).with_name("everywhere")
    packages = folder / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    (packages / "ropewalk.pth").write_text(
        # First on the path, as Debian's Python has a sitecustomize of its own.
        f"import sys; sys.path.insert(0, {str(hook)!r})\n"
        f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    )
    python = folder / "bin" / "python"
    for command in Path(sysconfig.get_path("scripts")).iterdir():  # gunicorn, uvicorn: they name their Python
        first, _, rest = command.read_bytes().partition(b"\n")
        if (
            first.startswith(b"#!")
            and b"python" in first
            and not (copy := python.with_name(command.name)).exists()
        ):
            copy.write_bytes(b"#!%b\n%b" % (str(python).encode(), rest))
            copy.chmod(0o755)
    return python


def run_all(python: Path, tree: Path, only: str) -> Iterator[tuple[str, str]]:
    """Yield each test's name and outcome."""
    variables = {
        "PYTHONPATH": os.pathsep.join([str(tree), str(tree / "envs")]),
        "PATH": os.pathsep.join([str(python.parent), os.environ["PATH"]]),
        "VIRTUAL_ENV": str(python.parent.parent),
    }
    environment = {**os.environ, **variables}
    report = tree.parent / "report.xml"
    files = sorted(file for folder in FOLDERS for file in (tree / folder).rglob("test_*.py"))
    for file in files:
        name = file.relative_to(tree).as_posix()
        if only not in name:
            continue
        start, report_text = time.monotonic(), ""
        report.unlink(missing_ok=True)
        command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", name]
        process = subprocess.Popen(
            command,
            cwd=tree,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(FILE_TIMEOUT_S)
            report_text = report.read_text(errors="replace") if report.exists() else ""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with the servers that its tests leave behind
        process.wait()
        outcomes = dict(read_report(report_text, name)) or {f"{name}::*": "no report"}
        counts = Counter(outcomes.values())
        print(
            f"{name}: {', '.join(f'{n} {what}' for what, n in counts.items())} ({time.monotonic() - start:.0f} s)",
            flush=True,
        )
        yield from outcomes.items()


def read_report(text: str, file: str) -> Iterator[tuple[str, str]]:
    """Yield the tests of a JUnit report: `FILE::CLASS::NAME`, and passed, failed, error or skipped."""
    module = file.removesuffix(".py").replace("/", ".")
    for case in ET.fromstring(text).iter("testcase") if text else ():
        within = case.get("classname", "").removeprefix(module).strip(".").replace(".", "::")
        # A file that cannot be imported, or is skipped whole, is reported as a case without a name of its own.
        name = (
            "::".join(filter(None, [file, within, case.get("name")]))
            if within or case.get("classname") == module
            else f"{file}::*"
        )
        kinds = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        yield name, {"failure": "failed"}.get(kinds[0], kinds[0]) if kinds else PASSED


def read_expected() -> tuple[int, dict[str, str]]:
    """Return how many tests are expected to pass, and the reasons of those that are not, by name."""
    passing, reasons = 0, {}
    for line in EXPECTED.read_text().splitlines():
        key, _, value = line.partition("\t")
        if key == PASSED:
            passing = int(value)
        elif key in REASONS:
            reasons[value] = key
        elif line and not line.startswith("#"):
            sys.exit(
                f"{EXPECTED.name}: expected a reason ({', '.join(REASONS)}), a tab and a test, got {line!r}"
            )
    return passing, reasons


def compare(outcomes: Mapping[str, str], passing: int, reasons: Mapping[str, str]) -> int:
    """Print what is not as expected; return 0 if nothing is."""
    passed = {name for name, outcome in outcomes.items() if outcome == PASSED}
    worse = sorted(outcomes.keys() - passed - reasons.keys())
    better = sorted(passed & reasons.keys())
    gone = sorted(reasons.keys() - outcomes.keys())
    for title, names in (
        ("no longer pass", worse),
        ("pass by now; remove them from the list", better),
        ("are gone", gone),
    ):
        if names:
            print(f"{len(names)} {title}:", *names, sep="\n  ")
    counts = Counter(reasons.values())
    print(f"{len(passed):,} of {len(outcomes):,} pass, {passing:,} were expected to. The others:")
    for reason, words in REASONS.items():
        print(f"  {counts[reason]:>4}  {words}")
    return int(bool(worse or better or gone or len(passed) != passing))


if __name__ == "__main__":
    sys.exit(main())
