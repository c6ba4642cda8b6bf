"""`ropewalk eval`: evaluates a policy in environments, and compares evaluations."""

import argparse
import asyncio
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from openenv_core.cli.command import Command, add_fields, read_fields, read_object, sanitize
from openenv_core.errors import ConfigurationError, ConnectionFailedError, OpenEnvError, ProviderError

if TYPE_CHECKING:
    from openenv_core.evaluation.episodes import Arena
    from openenv_core.evaluation.records import EvaluationFolder, EvaluationSettings

FOLDER: Final = "evals"
RUN_FILE: Final = "config.yaml"
"""File with the configuration of an evaluation by `--config`, for `--resume`."""
MAX_SHOWN_ENDS: Final = 10
"""Tasks shown at each end of those that differ, in order of the difference."""


_NO_SETTINGS: Final = ("environments", "policy", "agent", "agent_sandbox")
"""Fields of `EvaluationSettings` that are arguments of another form."""

_READERS: Final[Mapping[str, Callable[[str], Any]]] = {
    "reset": read_object,
    "seats": lambda text: text.split(","),
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `eval`; the model `EvaluationSettings` reads and checks the texts of most."""
    from openenv_core.evaluation.records import EvaluationSettings

    add = parser.add_argument
    add(
        "targets",
        nargs="*",
        metavar="ENV",
        help="environments, each a name, folder, module:attribute, URL or image; with --config overrides of its "
        "keys: section.key=value",
    )
    add(
        "--policy",
        metavar="POLICY",
        help="random; module:callable, given an observation's fields, returns an action's; the URL of an "
        "OpenAI-compatible server, up to and with /v1; or a checkpoint's folder (needs the extra rl or rl-cpu)",
    )
    add(
        "--agent",
        metavar="AGENT",
        help="an agent that plays with the model at --policy URL: claude-code, codex, opencode or mini-swe-agent, or "
        "module:function (needs the extra rl or rl-cpu)",
    )
    add(
        "--out", metavar="FOLDER", help=f"folder of records and figures; by default a new one below {FOLDER}/"
    )
    add("--resume", metavar="FOLDER", help="continue an interrupted evaluation")
    add(
        "--compare", nargs=2, metavar=("A", "B"), help="compare two evaluations' folders task by task; no ENV"
    )
    add("--json", action="store_true", help="print the figures as one JSON document")
    add(
        "--agent-sandbox",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="whether an agent's program is confined to an empty folder and, of all networks, to model and tools "
        "(where this machine permits it)",
    )
    group = parser.add_argument_group("episodes, models and sessions")
    add_fields(group, EvaluationSettings, without=_NO_SETTINGS, readers=_READERS)
    run = parser.add_argument_group("held-out episodes of a training run")
    run.add_argument("--config", metavar="FILE", help="a run's YAML file: its environments, task and policy")
    run.add_argument("--name", help="the folder below output_dir; by default the run's name and the time")


_ALONE: Final = {
    "config": ("name",),
    "compare": ("json",),
    "resume": ("json",),
}
"""Options that may be combined with each option that selects a mode."""


def reword(argv: Sequence[str]) -> Sequence[str]:
    """Convert the configuration keys of a training run; see `rl_bridge.cli.common`."""
    if not any(word.partition("=")[0] == "--config" for word in argv):
        return argv
    from openenv_core.evaluation.policies import load_provided

    return load_provided("reword", "a training run's configuration")(argv)  # type: ignore[no-any-return]


def run(arguments: argparse.Namespace) -> int:
    """Evaluate or compare; return 1 if the evaluation could not be completed. Wrong usage raises: status 2."""
    modes = [name for name in _ALONE if getattr(arguments, name)]
    options = {name: value for name, value in vars(arguments).items() if value not in (None, [], False)}
    if modes:
        allowed = {modes[0], *_ALONE[modes[0]], *(("targets",) if modes[0] == "config" else ())}
        if extra := sorted(options.keys() - allowed):
            conflicts = " and ".join(
                "ENV" if name == "targets" else f"--{name.replace('_', '-')}" for name in extra
            )
            raise ConfigurationError(f"expected --{modes[0]} without {conflicts}; leave one out")
    run_config = arguments.config
    if arguments.resume and Path(arguments.resume, RUN_FILE).exists():
        run_config = arguments.resume
    if run_config:
        from openenv_core.evaluation.policies import load_provided

        evaluate = load_provided("config", "a training run's configuration")
        return evaluate(run_config, arguments.targets, arguments.name)  # type: ignore[no-any-return]
    if arguments.name:
        raise ConfigurationError("expected --name with --config; a folder is named by --out")
    if arguments.compare:
        return _compare(*map(Path, arguments.compare), as_json=arguments.json)
    return _evaluate(arguments)


def _evaluate(arguments: argparse.Namespace) -> int:
    from openenv_core.evaluation.records import EvaluationFolder

    if arguments.resume:
        folder = EvaluationFolder(Path(arguments.resume))
    else:
        settings = _settings(arguments)
        targets = "-".join(Path(text).resolve().name.replace(":", "-") for text in settings.environments)
        name = f"{FOLDER}/{targets}-{time.strftime('%Y%m%d-%H%M%S')}"
        folder = EvaluationFolder.begin(Path(arguments.out or name), settings)
    settings = folder.settings()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM ends it like Ctrl-C
    try:
        with folder:
            asyncio.run(_play(folder, settings))
        return _report(folder, settings, as_json=arguments.json)
    except KeyboardInterrupt:
        _print_status(f"interrupted; continue it with: ropewalk eval --resume {folder.path}")
        raise
    except OpenEnvError as error:
        unusable = (ConfigurationError, ConnectionFailedError, ProviderError)
        if not folder.records and not arguments.resume and isinstance(error, unusable):
            shutil.rmtree(folder.path, ignore_errors=True)  # nothing was played: the name is free again
            raise
        if isinstance(error, ConfigurationError):
            raise
        _print_status(f"ropewalk eval: {error}\ncontinue it with: ropewalk eval --resume {folder.path}")
        return 1


def _settings(arguments: argparse.Namespace) -> "EvaluationSettings":
    from openenv_core.evaluation.records import EvaluationSettings

    if not arguments.targets or arguments.policy is None:
        raise ConfigurationError(
            "expected environments and --policy (or --config FILE, --resume FOLDER, --compare A B), as in "
            "`ropewalk eval blackjack --policy random`"
        )
    if len(set(arguments.targets)) < len(arguments.targets):
        raise ConfigurationError(f"expected each environment once, got {' '.join(arguments.targets)}")
    return read_fields(EvaluationSettings, arguments, environments=tuple(arguments.targets))


async def _play(folder: "EvaluationFolder", settings: "EvaluationSettings") -> None:
    from openenv_core.evaluation.episodes import Arena
    from openenv_core.evaluation.policies import open_policy
    from openenv_core.targets import TargetKind, run_target, target_of

    if finished := sum(record.reward is not None for record in folder.records.values()):
        _print_status(f"{finished:,} episodes have been played already")
    targets = {text: target_of(text) for text in settings.environments}
    first_group = 0
    async with open_policy(settings, folder.path) as policy:
        for text, target in targets.items():
            token = (os.environ.get("ROPEWALK_TOKEN") or None) if target.kind is TargetKind.URL else None
            with run_target(target) as running:
                for name, environment, seat in settings.places:
                    if environment == text:
                        arena = Arena(
                            environment=name,
                            url=running.url,
                            token=token,
                            policy=policy,
                            settings=settings,
                            provider=running.provider,
                        )
                        first_group += await _play_missing(folder, arena, seat, first_group)


async def _play_missing(
    folder: "EvaluationFolder", arena: "Arena", seat: str | None, first_group: int
) -> int:
    """Play the missing episodes of an environment, or of a seat of it; return its number of tasks."""
    from openenv_core.evaluation.episodes import plan_episodes
    from openenv_core.evaluation.records import LOST, EpisodeRecord, ProgressBar

    tasks = await arena.count_tasks(seat)
    plan = plan_episodes(arena.settings, first_group, tasks, seat)
    kept = {key for key, record in folder.records.items() if record.ending not in LOST}
    todo = [each for each in plan if (arena.environment, each.group, each.sibling) not in kept]
    played_count = len(plan) - len(todo)
    with ProgressBar(arena.environment, len(plan)) as bar:

        def done(record: EpisodeRecord) -> None:
            nonlocal played_count
            played_count += 1
            folder.write(record)
            bar.update(played_count)

        if todo:
            await arena.play(todo, done)
    return tasks


def _report(folder: "EvaluationFolder", settings: "EvaluationSettings", *, as_json: bool) -> int:
    """Print and save the metrics; return 1 if an environment has no episodes."""
    from openenv_core.evaluation.records import summarize, table_lines, warnings_of
    from openenv_core.targets import declared_reward_range, find_target

    summaries = {
        name: summarize(
            [record for record in folder.records.values() if record.environment == name],
            success=settings.success,
            repetitions=settings.repetitions,
            reward_range=declared_reward_range(find_target(environment)),
        )
        for name, environment, _ in settings.places
    }
    agent = {} if settings.agent is None else {"agent": settings.agent}
    report = {"policy": settings.policy, **agent, "environments": summaries}
    folder.finish(report)
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        k = settings.repetitions
        headings = ["environment", "episodes", "mean reward", "win rate", *([f"pass@{k}"] if k > 1 else [])]
        rows = [
            [
                name,
                f"{summary['episodes']:,}",
                _with_interval(summary["mean_reward"], summary["ci95"]),
                _with_interval(summary["win_rate"], summary["win_ci95"]),
                *([_with_interval(*summary["pass_at"][str(k)][:2])] if k > 1 else []),
            ]
            for name, summary in summaries.items()
        ]
        print("\n".join(table_lines(headings, rows)))
        endings = sorted({ending for summary in summaries.values() for ending in summary["endings"]})
        counts = [
            [name, *(f"{summary['endings'].get(ending, 0):,}" for ending in endings)]
            for name, summary in summaries.items()
        ]
        print("\n" + "\n".join(table_lines(["ended as", *endings], counts)))
    for name, summary in summaries.items():
        for warning in warnings_of(summary):
            _print_status(f"{name}: {warning}")
    if any(summary["dropped"] for summary in summaries.values()):
        _print_status(f"dropped episodes are played again by: ropewalk eval --resume {folder.path}")
    _print_status(f"records are in {folder.path}; read them by: ropewalk rollouts {folder.path}")
    return 0 if all(summary["episodes"] for summary in summaries.values()) else 1


def _compare(first: Path, second: Path, *, as_json: bool) -> int:
    from openenv_core.evaluation.records import EvaluationFolder, compare, summarize, table_lines, warnings_of

    comparison = compare(EvaluationFolder(first), EvaluationFolder(second))
    if as_json:
        print(json.dumps(comparison, indent=2))
        return 0
    headings = ["environment", "tasks", "mean A", "mean B", "B - A", "B better", "equal", "worse"]
    rows = [
        [
            name,
            f"{row['tasks']:,}",
            _format_number(row["first_mean"]),
            _format_number(row["second_mean"]),
            _with_interval(row["difference"], row["ci95"]),
            *(f"{row[key]:,}" for key in ("better", "equal", "worse")),
        ]
        for name, row in comparison.items()
    ]
    print("\n".join(table_lines(headings, rows)))
    for at, (label, path) in enumerate((("A", first), ("B", second))):
        records = EvaluationFolder(path).read().records.values()
        for row in comparison.values():
            name = row["environments"][at]
            for warning in warnings_of(summarize([each for each in records if each.environment == name])):
                _print_status(f"{name}, {label}: {warning}")
    for name, row in comparison.items():
        if len(set(row["environments"])) > 1:
            _print_status(f"{name} are compared as one environment, the only one of each evaluation")
        if row["unpaired"]:
            _print_status(
                f"{name}: {row['unpaired']} tasks have a reward in one of the two alone, and are left out"
            )
        by_task = row["by_task"]
        changes = {task: b - a for task, (a, b) in by_task.items() if a != b}
        order = sorted(changes, key=lambda task: (changes[task], int(task)))
        listed = order[:MAX_SHOWN_ENDS] + order[MAX_SHOWN_ENDS:][-MAX_SHOWN_ENDS:]
        if listed:
            lines = [[task, *map(_format_number, (*by_task[task], changes[task]))] for task in listed]
            print("\n" + "\n".join(table_lines([f"{name}: task", "A", "B", "B - A"], lines)))
        if len(listed) < len(order):
            print(f"the {len(listed)} that differ most of {len(order):,} that do; --json has all")
    return 0


def _format_number(value: float | None) -> str:
    return "-" if value is None else f"{value:+.4f}"


def _with_interval(value: float | None, interval: Sequence[float] | None) -> str:
    return _format_number(value) + ("" if interval is None else f" [{interval[0]:+.4f}, {interval[1]:+.4f}]")


def _print_status(text: str) -> None:
    print(sanitize(text), file=sys.stderr)


COMMAND = Command(
    name="eval",
    help="play a policy in environments: mean reward, win rate and pass@k with intervals",
    configure=configure,
    run=run,
    reword=reword,
    examples=(
        "ropewalk eval blackjack --policy random --episodes 20000",
        "ropewalk eval blackjack --policy my_policies:basic --episodes 1000 --out evals/basic",
        "ropewalk eval shop sqlite --policy http://localhost:8000/v1 --model NAME --repetitions 4",
        "ropewalk eval sqlite --agent codex --policy http://localhost:8000/v1 --model NAME --sessions 4",
        "ropewalk eval shop --split test --policy path/to/checkpoint",
        "ropewalk eval kuhn --policy random --seats first,second",
        "ropewalk eval --resume evals/basic",
        "ropewalk eval --compare evals/random evals/basic",
        "ropewalk eval --config examples/grpo_blackjack/config.yaml model.path=CHECKPOINT",
    ),
)

EVALUATE = replace(COMMAND, name="evaluate", help="the same as eval")
