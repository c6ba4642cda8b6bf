"""The files of an evaluation's folder: its settings, a line per episode, the statistics."""

import contextlib
import fcntl
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Final, Literal, Self, TypeAlias

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from openenv_core.errors import ConfigurationError, OpenEnvError, describe_faults
from openenv_core.evaluation.statistics import paired_statistics, reward_statistics

SETTINGS_FILE: Final = "settings.json"
RECORDS_FILE: Final = "rollouts/000001.jsonl"
"""Where `ropewalk rollouts` looks for records."""
FIGURES_FILE: Final = "evaluation.json"

BAR_WIDTH: Final = 30

REASON_CHARS: Final = 1000

MAX_TEXT_CHARS: Final = 60_000
"""Limit of one text; the middle of a longer one is left out."""

FAILED_ENVIRONMENT: Final = "failed_environment"
FAILED_POLICY: Final = "failed_policy"
UNSCORED: Final = "failed_reward"
LOST: Final = frozenset({FAILED_ENVIRONMENT, FAILED_POLICY})
"""Endings of episodes that are played again when an evaluation is resumed."""

ILLEGAL: Final = frozenset({"illegal_answer", "unparsable_call", "refused_action"})
"""Endings of episodes that the policy ended by an action that is none."""

CUT: Final = frozenset({"truncated_turns", "truncated_length", "truncated_time"})
"""Endings of episodes that a limit of the evaluation cut off."""


class EvaluationSettings(BaseModel):
    """The settings of an evaluation; the descriptions are the help of `ropewalk eval`."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    environments: tuple[str, ...]
    policy: str
    agent: str | None = None
    agent_sandbox: bool | None = None

    episodes: PositiveInt = Field(100, description="tasks: seeds from --seed on, or indexes of --split")
    seed: NonNegativeInt = Field(0, description="the first seed, also of a policy's random choices")
    split: str | None = Field(None, description="play the first tasks of this split instead of seeds")
    repetitions: PositiveInt = Field(1, description="episodes of each task, for pass@k")
    reset: dict[str, Any] = Field({}, description="further options of every reset, in JSON")
    seats: tuple[str, ...] = Field(
        (),
        description="in a game of several players: play every task once in each of these seats, separated by commas, "
        "with figures of each; the server's policies play the others",
    )
    max_turns: PositiveInt = Field(64, description="most actions, or answers, of an episode")
    success: float | None = Field(None, description="least reward of a success (by default above 0)")

    model: str | None = Field(None, description="the served model's name; needed if there are several")
    mode: Literal["tools", "text"] = Field("tools", description="tools: calls by the protocol; text: in text")
    system: str | None = Field(None, description="system message of each chat")
    temperature: float = Field(0, description="0 takes the most likely token")
    max_tokens: PositiveInt = Field(1024, description="most tokens of an answer")
    key_variable: str | None = Field(None, description="environment variable with the server's key")
    policy_timeout_s: PositiveFloat = Field(600, description="for an answer, retries included")
    agent_timeout_s: PositiveFloat = Field(600, description="for an agent's episode")

    sessions: PositiveInt = Field(64, description="concurrent episodes")
    timeout_s: PositiveFloat = Field(60, description="for a reset or step")
    patience_s: PositiveFloat = Field(60, description="how long a lost episode is retried")

    @property
    def places(self) -> list[tuple[str, str, str | None]]:
        """The name in records, the environment and the seat of everything that the policy plays."""
        return [
            (name if seat is None else f"{name} as {seat}", name, seat)
            for name in self.environments
            for seat in self.seats or (None,)
        ]

    @model_validator(mode="after")
    def _check_agent(self) -> Self:
        if self.agent is None:
            return self
        if not self.policy.startswith(("http://", "https://")):
            raise ValueError(
                "expected --agent with a model's server as --policy, its URL up to and with /v1; serve a checkpoint "
                "first, or play it by: ropewalk eval --config FILE rollout.agent.preset=NAME"
            )
        if self.mode == "text":
            raise ValueError("expected --agent without --mode text: agents call tools by the protocol")
        return self


class EpisodeRecord(BaseModel):
    """One episode: a line of the records, which `ropewalk rollouts` shows.

    Attributes:
        environment: The environment's name, and the seat that the policy plays if seats are evaluated.
        group: The task's number in the evaluation.
        sibling: The task's repetition.
        seed: The seed of the reset, or the index of a split's task.
        ending: Why it ended, a value of `rl_bridge.types.Ending`.
        reward: The sum of its rewards; None if it could not be scored.
        reason: Why it has no reward, or why the environment refused an action.
        tool_calls: Number of tool calls.
        turns: The turns in order, each with the policy's input as `context` and its `answer`; an agent's also with
            `parent`, the index of the turn that it continues, or None.
        iteration, version, advantage: Fields of training records, without meaning here.
    """

    environment: str
    group: int
    sibling: int
    seed: int
    ending: str
    reward: float | None
    reason: str | None = None
    tool_calls: int = 0
    turns: list[dict[str, Any]] = []
    iteration: int = 1
    version: int = 0
    advantage: float | None = None

    def fail(self, ending: str, reason: str) -> None:
        """Take its reward, and keep why it has none."""
        self.ending, self.reason, self.reward = ending, reason[:REASON_CHARS], None


def turn_record(context: str, answer: str, *, fresh: bool) -> dict[str, Any]:
    """Return a turn in the format of records, a long text without its middle."""
    left_out = None
    if len(context) > MAX_TEXT_CHARS:
        half_chars = MAX_TEXT_CHARS // 2
        left_out = {"at": half_chars, "characters": len(context) - 2 * half_chars}
        context = context[:half_chars] + context[-half_chars:]
    return {"fresh": fresh, "context": context, "left_out": left_out, "answer": answer[:MAX_TEXT_CHARS]}


class EvaluationFolder:
    """The folder of an evaluation; one process at a time may write to it.

    Attributes:
        records: The last record of each episode, by (environment, task, repetition).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: dict[tuple[str, int, int], EpisodeRecord] = {}
        self._file: Any = None
        self._complete_bytes = 0  # size of the complete lines

    @classmethod
    def begin(cls, path: Path, settings: EvaluationSettings) -> Self:
        """Create the folder; ConfigurationError if it is not empty or cannot be created."""
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ConfigurationError(
                f"expected a new folder for the evaluation, {str(path)!r} is there already; choose another by --out, "
                f"or go on with it by --resume {path}"
            )
        try:
            path.mkdir(parents=True, exist_ok=True)
            (path / SETTINGS_FILE).write_text(settings.model_dump_json(indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigurationError(f"cannot write to {str(path)!r}: {error.strerror}") from error
        return cls(path)

    def settings(self) -> EvaluationSettings:
        """Return the evaluation's settings; ConfigurationError if this is not an evaluation's folder."""
        try:
            return EvaluationSettings.model_validate_json((self.path / SETTINGS_FILE).read_bytes())
        except OSError as error:
            raise ConfigurationError(
                f"expected an evaluation's folder with {SETTINGS_FILE}, got {str(self.path)!r}: {error.strerror}"
            ) from error
        except ValidationError as error:
            raise ConfigurationError(
                f"cannot read {str(self.path / SETTINGS_FILE)!r}: {describe_faults(error, 'settings')}"
            ) from None

    def read(self) -> Self:
        """Read the records; an incomplete last line is ignored."""
        self._complete_bytes = 0
        with contextlib.suppress(FileNotFoundError), (self.path / RECORDS_FILE).open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                self._complete_bytes += len(line)
                try:
                    self._note(EpisodeRecord.model_validate_json(line))
                except ValidationError as error:
                    raise ConfigurationError(
                        f"cannot read line {number} of {str(self.path / RECORDS_FILE)!r}: "
                        f"{describe_faults(error, 'record')}"
                    ) from None
        return self

    def __enter__(self) -> Self:
        try:
            (self.path / RECORDS_FILE).parent.mkdir(parents=True, exist_ok=True)
            file = (self.path / RECORDS_FILE).open("ab+", buffering=0)
        except OSError as error:
            raise ConfigurationError(f"cannot write to {str(self.path)!r}: {error.strerror}") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            file.close()
            raise ConfigurationError(f"another process writes to {str(self.path)!r}; wait for it") from None
        except OSError:
            pass  # a file system without locks, such as Lustre without `-o flock`
        self._file = file
        self.read()
        file.truncate(self._complete_bytes)  # removes a line left incomplete by a kill
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, record: EpisodeRecord) -> None:
        """Append a record; OpenEnvError if it cannot be written, in which case the earlier records are intact."""
        text = json.dumps(record.model_dump(mode="json"), ensure_ascii=False)
        line = text.encode(errors="replace") + b"\n"  # a text may hold half of a surrogate pair
        left = memoryview(line)
        with self._writing():
            try:
                while left:  # a nearly full disk may accept only a part
                    left = left[self._file.write(left) :]
            except OSError:
                self._file.truncate(self._complete_bytes)
                raise
        self._complete_bytes += len(line)
        self._note(record)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            text = f"cannot write to {str(self.path)!r}: {error.strerror}; see that there is room"
            raise OpenEnvError(text) from error

    def _note(self, record: EpisodeRecord) -> None:
        record.turns = []  # they are in the file, and may be large
        self.records[record.environment, record.group, record.sibling] = record

    def finish(self, report: Mapping[str, Any]) -> None:
        """Write the statistics; OpenEnvError if they cannot be written."""
        with self._writing():
            (self.path / FIGURES_FILE).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


Rewards: TypeAlias = dict[tuple[str, int], list[float]]
"""Rewards of the scored episodes of each task, by the environment and the seed or index."""


def rewards_by_task(records: Iterable[EpisodeRecord]) -> Rewards:
    """Return the rewards of each task's scored episodes."""
    rewards: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    for record in records:
        if record.reward is not None:
            rewards[record.environment, record.seed].append(record.reward)
    return dict(rewards)


def summarize(
    records: Sequence[EpisodeRecord],
    *,
    success: float | None = None,
    repetitions: int = 1,
    reward_range: tuple[float, float] | None = None,
) -> dict[str, Any]:
    """Return the statistics of episodes, see `statistics.reward_statistics`, and how the episodes ended.

    Returns:
        The statistics; the `reward_range`; the `endings`, counted; the numbers of episodes `dropped`, lost to failures
        that are not the policy's, and `unscored`, played to the end but without a usable reward; `last_absence`, the
        reason of the last one without a reward; and `last_refusal`, that of the last one that ended with an illegal
        action.
    """
    rewards = rewards_by_task(records)
    without_reward = [record for record in records if record.reward is None]
    unscored = sum(record.ending == UNSCORED for record in without_reward)
    illegal = [record for record in records if record.ending in ILLEGAL]
    return {
        **reward_statistics(rewards, success=success, repetitions=repetitions, reward_range=reward_range),
        "reward_range": reward_range,
        "endings": dict(sorted(Counter(record.ending for record in records).items())),
        "dropped": len(without_reward) - unscored,
        "unscored": unscored,
        "last_absence": without_reward[-1].reason if without_reward else None,
        "last_refusal": illegal[-1].reason if illegal else None,
    }


def warnings_of(summary: Mapping[str, Any]) -> list[str]:
    """Return what a reader of the mean must know: episodes that ended illegally, were cut off, or have no reward."""
    endings: Mapping[str, int] = summary["endings"]
    total = sum(endings.values())
    illegal, cut = (sum(endings.get(ending, 0) for ending in group) for group in (ILLEGAL, CUT))
    warnings = []
    if illegal:
        because = f"; the last one because: {summary['last_refusal']}" if summary["last_refusal"] else ""
        warnings.append(
            f"{illegal:,} of {total:,} episodes ended with an illegal action, and are part of the mean{because}"
        )
    if cut:
        warnings.append(
            f"{cut:,} of {total:,} episodes were cut off before their end, and are part of the mean"
        )
    if missing := summary["dropped"] + summary["unscored"]:
        warnings.append(
            f"{missing} episodes are no part of the mean, {summary['dropped']} dropped and {summary['unscored']} "
            f"unscored, the last one because: {summary['last_absence']}"
        )
    return warnings


def compare(first: EvaluationFolder, second: EvaluationFolder) -> dict[str, dict[str, Any]]:
    """Return the `paired_statistics` of two evaluations by environment, and both mean rewards of each task.

    Environments are paired by their names, those of the two evaluations in `environments`. If each evaluation has a
    single one, the two are paired whatever their names: the same game may have been named by its folder and by its URL.

    Raises:
        ConfigurationError: They have no environment with rewards in common, or their tasks differ.
    """
    _require_same_tasks(first, second)
    first_rewards, second_rewards = (
        rewards_by_task(folder.read().records.values()) for folder in (first, second)
    )
    names = [
        list(dict.fromkeys(environment for environment, _ in rewards))
        for rewards in (first_rewards, second_rewards)
    ]
    pairs = [(name, name) for name in names[0] if name in names[1]]
    if not pairs and len(names[0]) == len(names[1]) == 1:
        pairs = [(names[0][0], names[1][0])]
    comparison = {}
    for pair in pairs:
        a, b = (
            {task: rewards[where, task] for where, task in sorted(rewards) if where == name}
            for name, rewards in zip(pair, (first_rewards, second_rewards), strict=True)
        )
        tasks = {str(task): [fmean(a[task]), fmean(b[task])] for task in a if task in b}
        name = " and ".join(dict.fromkeys(pair))
        comparison[name] = {"environments": list(pair), **paired_statistics(a, b), "by_task": tasks}
    if not comparison:
        listed = [", ".join(environments) or "none" for environments in names]
        raise ConfigurationError(
            f"expected two evaluations with rewards in an environment in common, got {listed[0]} in {first.path} and "
            f"{listed[1]} in {second.path}"
        )
    return comparison


def _require_same_tasks(*folders: EvaluationFolder) -> None:
    """Raise a ConfigurationError if seeds mean different tasks; a training run has no settings to compare."""
    if all((folder.path / SETTINGS_FILE).exists() for folder in folders):
        first, second = (folder.settings() for folder in folders)
        if (first.split, first.reset) != (second.split, second.reset):
            a, b = (
                (f"split {one.split}" if one.split else "tasks by seed")
                + f" and options {one.reset} of resets"
                for one in (first, second)
            )
            raise ConfigurationError(
                f"expected two evaluations of the same tasks, got {a} in {folders[0].path}, "
                f"and {b} in {folders[1].path}"
            )


def table_lines(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield a table's lines: the first column left-aligned, the others right-aligned."""
    lines = [list(headings), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for first, *rest in lines:
        cells = [
            first.ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)),
        ]
        yield "  ".join(cells).rstrip()


@dataclass
class ProgressBar:
    """A progress bar on a terminal; elsewhere a line per 10% done."""

    title: str
    total: int
    _drawn_tenths: int = -1

    def update(self, done: int) -> None:
        """Show how many are done."""
        live = sys.stderr.isatty()
        tenths = done * (100 if live else 10) // self.total
        if tenths <= self._drawn_tenths or (tenths == 0 and not live):
            return
        self._drawn_tenths = tenths
        text = f"{self.title}: {done:,} of {self.total:,}\n"
        if live:
            filled = "#" * (done * BAR_WIDTH // self.total)
            text = f"\r{self.title} [{filled:<{BAR_WIDTH}}] {done:,}/{self.total:,}"
        sys.stderr.write(text)
        sys.stderr.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._drawn_tenths >= 0 and sys.stderr.isatty():
            sys.stderr.write("\n")
