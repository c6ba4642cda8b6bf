"""`ropewalk validate`: every check on one environment."""

import argparse

from openenv_core.cli.command import Command

LEVELS = ("static", "runtime", "semantic", "hostile", "load")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `validate`."""
    add = parser.add_argument
    add("target", nargs="?", metavar="NAME|PATH|MODULE:ATTRIBUTE|URL|IMAGE", help="what is looked at")
    add("--level", action="append", choices=LEVELS, default=[], help="only this level; may be given again")
    add("--check", action="append", metavar="NAME", default=[], help="only this check; may be given again")


def run(arguments: argparse.Namespace) -> int:
    """Run the checks; 0 when none failed, 1 when one did."""
    from openenv_core.checker.catalogue import chosen
    from openenv_core.checker.check import Level
    from openenv_core.checker.runner import Result
    from openenv_core.checker.runner import run as run_checks
    from openenv_core.checker.subject import Subject

    checks = chosen([Level(level) for level in arguments.level], arguments.check)

    def tell(result: Result) -> None:
        print(f"{result.status:<8}{result.seconds:6.2f} s  {result.check}")
        if result.message:
            print(f"        {result.message}")
        if result.change:
            print(f"        change: {result.change}")

    with Subject.of(arguments.target) as subject:
        report = run_checks(subject, checks, after=tell)
    return 0 if report.ok else 1


COMMAND = Command(
    name="validate",
    help="check an environment: manifest, behaviour, determinism, hostile callers, load",
    configure=configure,
    run=run,
    examples=("ropewalk validate .", "ropewalk validate blackjack --level static --level runtime"),
)
