"""The released collection of rollouts: sessions are played one after the other into a file of JSON lines."""

import json
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Self

from openenv_core.compat.harness import Message, ResourceSessionFactory, VerifyResult
from openenv_core.compat.harness_rollouts import (
    HarnessAdapter,
    HarnessRolloutResult,
    HarnessRunLimits,
    ModelStep,
    ModelStepResult,
)
from openenv_core.compat.harness_sessions import resolve_reward, run_verified
from openenv_core.llm_client import LLMClient
from openenv_core.loop_thread import run_async_safely
from openenv_core.tools import Tool

logger = logging.getLogger(__name__)

RESULTS_FILENAME: Final = "results.jsonl"
METADATA_FILENAME: Final = "metadata.json"
README_FILENAME: Final = "README.md"
_SAMPLING: Final = frozenset({"temperature", "max_tokens", "top_p"})


@dataclass
class EpisodeRecord:
    """One collected episode."""

    episode_id: str
    messages: list[dict[str, Any]]
    reward: float
    done: bool
    tool_trace: list[dict[str, Any]]
    metrics: dict[str, Any]
    verify_metrics: dict[str, Any]
    artifacts: dict[str, Any]
    task: Any = None
    extra: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_rollout(
        cls,
        episode_id: str,
        rollout: HarnessRolloutResult,
        verify: VerifyResult,
        task: Any = None,
        extra: dict[str, Any] | None = None,
    ) -> Self:
        """Make a record of a rollout and its outcome; ValueError if they have no reward, or two."""
        return cls(
            episode_id=episode_id,
            messages=[dict(message) for message in rollout.messages],
            reward=resolve_reward(rollout, verify),
            done=bool(rollout.done or verify.done),
            tool_trace=[asdict(entry) for entry in rollout.tool_trace],
            metrics=dict(rollout.metrics),
            verify_metrics=dict(verify.metrics),
            artifacts=dict(verify.artifacts),
            task=task,
            extra=dict(extra or {}),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self), default=str))
        return plain


class RolloutSerializer:
    """A folder of collected episodes, one line each."""

    __slots__ = ("metadata_path", "output_dir", "results_path")

    def __init__(self, output_dir: Path | str) -> None:
        self.output_dir = Path(output_dir)
        self.results_path = self.output_dir / RESULTS_FILENAME
        self.metadata_path = self.output_dir / METADATA_FILENAME

    def write_episode(self, record: EpisodeRecord) -> None:
        """Append an episode."""
        self.output_dir.mkdir(parents=True, exist_ok=True)
        with self.results_path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record.to_dict()) + "\n")

    def write_metadata(self, metadata: dict[str, Any]) -> None:
        """Write what the episodes have in common."""
        self.output_dir.mkdir(parents=True, exist_ok=True)
        self.metadata_path.write_text(json.dumps(metadata, indent=2, default=str), encoding="utf-8")

    def collected_episode_ids(self) -> set[str]:
        """Return the ids of the episodes that are there; lines that are no JSON are left out."""
        ids = {episode.get("episode_id") for episode in _read_lines(self.results_path)}
        return {one for one in ids if isinstance(one, str)}


def _read_lines(path: Path) -> Iterable[Mapping[str, Any]]:
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            yield value


@dataclass
class CollectResult:
    """What a run has collected; `success_rate` is the share of rewards above 0."""

    num_collected: int
    num_skipped: int
    num_dropped: int
    num_failed: int
    episode_ids: list[str]
    avg_reward: float
    success_rate: float


@dataclass(kw_only=True, eq=False)
class CollectRunner:
    """Plays episodes into a folder; those that are there are not played again.

    Args:
        session_factory: Makes the session of each episode.
        harness_adapter: Drives the agent.
        serializer: The folder.
        tasks: The episodes' tasks, in their order; None once they are used up.
        limits: Limits of each rollout.
    """

    session_factory: ResourceSessionFactory[Any]
    harness_adapter: HarnessAdapter
    serializer: RolloutSerializer
    tasks: Iterable[Any] | None = None
    limits: HarnessRunLimits | None = None

    def __post_init__(self) -> None:
        self._tasks = iter(self.tasks if self.tasks is not None else ())

    def run(
        self,
        *,
        model_step: ModelStep,
        num_episodes: int,
        episode_id_prefix: str = "ep",
        resume: bool = True,
        should_keep: Callable[[EpisodeRecord], bool] | None = None,
    ) -> CollectResult:
        """Play episodes that are not there yet; one that fails is logged and counted.

        Args:
            model_step: Samples the answers.
            num_episodes: How many the folder is to have.
            episode_id_prefix: The beginning of their ids.
            resume: False moves earlier results aside.
            should_keep: Whether an episode is written.
        """
        if not resume:
            self._move_results()
        ids = [f"{episode_id_prefix}-{number:06d}" for number in range(num_episodes)]
        there = self.serializer.collected_episode_ids()
        fates: Counter[str] = Counter()
        rewards: list[float] = []
        for episode_id in ids:
            task = next(self._tasks, None)  # also of an episode that is there: tasks stay with their episodes
            if episode_id in there:
                fates["skipped"] += 1
                continue
            try:
                record = self._play(episode_id, task, model_step)
            except Exception as error:
                logger.warning("%s failed: %s: %s", episode_id, type(error).__name__, error)
                fates["failed"] += 1
                continue
            if should_keep is not None and not should_keep(record):
                fates["dropped"] += 1
                continue
            self.serializer.write_episode(record)
            rewards.append(record.reward)
        count = max(1, len(rewards))
        return CollectResult(
            num_collected=len(rewards),
            num_skipped=fates["skipped"],
            num_dropped=fates["dropped"],
            num_failed=fates["failed"],
            episode_ids=ids,
            avg_reward=sum(rewards) / count,
            success_rate=sum(reward > 0 for reward in rewards) / count,
        )

    def _play(self, episode_id: str, task: Any, model_step: ModelStep) -> EpisodeRecord:
        session = self.session_factory.create(task=task, episode_id=episode_id)
        try:
            rollout, outcome = run_verified(self.harness_adapter, model_step, session, self.limits)
            return EpisodeRecord.from_rollout(episode_id, rollout, outcome, task)
        finally:
            session.close()

    def _move_results(self) -> None:
        path = self.serializer.results_path
        if not path.exists():
            return
        moved = path.with_name(f"{path.stem}.{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}.bak{path.suffix}")
        path.replace(moved)
        warnings.warn(f"resume=False moved existing results file to {moved}", RuntimeWarning, stacklevel=3)


def build_model_step(llm_client: LLMClient, *, system_prompt: str | None = None) -> ModelStep:
    """Return a `ModelStep` that asks a client; `system_prompt` is for chats without a system message."""

    def model_step(messages: list[Message], tools: list[Tool], sampling: dict[str, Any]) -> ModelStepResult:
        chat = list(messages)
        if system_prompt and not any(message.get("role") == "system" for message in chat):
            chat.insert(0, {"role": "system", "content": system_prompt})
        if unknown := sorted(sampling.keys() - _SAMPLING):
            warnings.warn(
                f"Dropping unsupported sampling keys: {', '.join(unknown)}", RuntimeWarning, stacklevel=2
            )
        listed = [
            {"name": tool.name, "description": tool.description, "inputSchema": tool.input_schema}
            for tool in tools
        ]
        known = {name: value for name, value in sampling.items() if name in _SAMPLING}
        return ModelStepResult(run_async_safely(llm_client.complete_with_tools(chat, listed, **known)))

    return model_step


def build_dataset_readme(output_dir: Path) -> str:
    """Return the card of a folder as a dataset of the Hugging Face Hub."""
    folder = RolloutSerializer(output_dir)
    path = folder.metadata_path
    metadata = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    rows = "".join(f"\n| `{key}` | `{value}` |" for key, value in metadata.items())
    table = f"\n| key | value |\n| --- | --- |{rows}\n" if rows else ""
    return f"""---
configs:
- config_name: default
  data_files:
  - split: train
    path: "{RESULTS_FILENAME}"
---
# OpenEnv rollouts

- **Episodes:** {sum(1 for _ in _read_lines(folder.results_path))}
{table}
## Schema

Each line of `{RESULTS_FILENAME}` is one episode: `episode_id`, `messages` (the chat), `reward`, `done`, `tool_trace`
(`tool_name`, `arguments`, `result` of each call), `metrics`, `verify_metrics`, `artifacts`, `task`, `extra`.
"""


def push_to_hf_hub(
    output_dir: Path | str,
    repo_id: str,
    *,
    private: bool = False,
    commit_message: str | None = None,
    token: str | None = None,
) -> str:
    """Upload a folder of episodes with its card as a dataset of the Hugging Face Hub; returns its address.

    Raises:
        FileNotFoundError: The folder has no episodes.
    """
    folder = RolloutSerializer(output_dir)
    if not folder.results_path.exists():
        raise FileNotFoundError(f"no {RESULTS_FILENAME} in {output_dir}; collect episodes first")
    from huggingface_hub import HfApi

    (folder.output_dir / README_FILENAME).write_text(
        build_dataset_readme(folder.output_dir), encoding="utf-8"
    )
    count = sum(1 for _ in _read_lines(folder.results_path))
    api = HfApi(token=token)
    api.create_repo(repo_id=repo_id, repo_type="dataset", private=private, exist_ok=True)
    api.upload_folder(
        folder_path=str(folder.output_dir),
        repo_id=repo_id,
        repo_type="dataset",
        commit_message=commit_message or f"Add {count} collected episode(s)",
    )
    return f"https://huggingface.co/datasets/{repo_id}"
