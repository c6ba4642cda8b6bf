"""What a step costs the controller: CPU and bytes a token, with the tokens in what passes through it, and without them.

The figures are those of one step: results of workers are read, groups added, advantages computed, and the step is sent
to each rank of the trainer. `lists` is how a loop of one's own trains on trajectories that it holds, and was the way of
`ropewalk train` before workers sent tokens to the trainer; `keys` is the way now. In alternating rounds:
  python -m benchmarks.controller              about two minutes
  python -m benchmarks.controller --quick      does it run?
"""

import json
import pickle
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.harness import Bar, Benchmark, Measurements, at_least, in_rounds, main, ratio, setting
from rl_bridge.buffer.batch import TrainBatch
from rl_bridge.buffer.stored import LeasesInUse
from rl_bridge.config import Config
from rl_bridge.rollout.assignment import AssignmentResult
from rl_bridge.rollout.groups import rollout_metrics, stored_batch, trained_trajectories, training_samples
from rl_bridge.tokens.conversation import Prefix
from rl_bridge.trainer.passes import rank_batches
from rl_bridge.trainer.settings import TrainerSettings
from rl_bridge.types import Completion, Ending, Group, Trajectory, Turn

CPU, BYTES, OBJECTS = "CPU ns/token", "bytes/token", "objects/trajectory"
LISTS, KEYS = "lists", "keys"
FIGURES: Final = (CPU, BYTES, OBJECTS)
TABLES: Final = {"A step": (CPU, f"{CPU}, lists over it", BYTES, f"{BYTES}, lists over it", OBJECTS)}
MODEL: Final = {
    "model_type": "qwen3",
    "attention_bias": False,
    "hidden_act": "silu",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
}
"""Qwen3 8B's, whose sizes decide how a batch is divided."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured: a step's trajectories, whose chats grow by the same number of tokens in each turn."""

    rounds: int = setting(5, quick=1, option="steps of each kind (5)")
    groups: int = setting(16, quick=2)
    group_size: int = setting(8, quick=2)
    turns: int = 8
    prompt_tokens: int = setting(250, quick=20)
    answer_tokens: int = setting(125, quick=10)
    ranks: int = 8

    @property
    def trajectories(self) -> int:
        """Trajectories of a step."""
        return self.groups * self.group_size

    @property
    def tokens(self) -> int:
        """Tokens of a trajectory."""
        return self.turns * (self.prompt_tokens + self.answer_tokens)


def play(plan: Plan, group: int, sibling: int) -> Trajectory:
    """Return a trajectory with its tokens, as a worker holds it."""
    chat, turns = list[int](), list[Turn]()
    for turn in range(plan.turns):
        # Siblings share their first prompt.
        first = 1000 * group + (0 if turn == 0 else 100 * sibling + turn)
        chat += [(first + 7 * place) % 150_000 for place in range(plan.prompt_tokens)]
        answer = Completion(
            tokens=[(sibling + 13 * place) % 150_000 for place in range(plan.answer_tokens)],
            logprobs=[-0.001 * (place + 1) for place in range(plan.answer_tokens)],
            versions=[3] * plan.answer_tokens,
            stopped=True,
        )
        turns.append(Turn(prompt=Prefix(chat), completion=answer))
        chat += answer.tokens
    return Trajectory(seed=group, turns=turns, ending=Ending.COMPLETED, reward=float(sibling % 3))


def make_results(plan: Plan, *, with_tokens: bool) -> list[bytes]:
    """Return the results of a step's assignments, as they arrive."""
    results = []
    for group in range(plan.groups):
        outcomes = [play(plan, group, sibling) for sibling in range(plan.group_size)]
        if not with_tokens:
            outcomes = [
                one.without_tokens(lease=group, sibling=sibling) for sibling, one in enumerate(outcomes)
            ]
        results.append(pickle.dumps(AssignmentResult(lease=group, outcomes=tuple(outcomes))))
    return results


def receive(results: Sequence[bytes]) -> list[Group]:
    """Return the groups of a step, with the version of each looked up, as the replay buffer does."""
    groups = []
    for number, content in enumerate(results):
        result: AssignmentResult = pickle.loads(content)
        trajectories = [outcome for outcome in result.outcomes if isinstance(outcome, Trajectory)]
        groups.append(Group(id=number, seed=number, trajectories=trajectories))
        assert groups[-1].version == 3
    rollout_metrics(groups, version=3)
    return groups


def send_lists(groups: Sequence[Group], settings: TrainerSettings, ranks: int) -> list[bytes]:
    """Return what each rank of the trainer is sent of groups with their tokens."""
    batch = TrainBatch.from_samples(training_samples(groups, normalize_std=True))
    return [pickle.dumps(part) for part in rank_batches(batch, settings, version=3, ranks=ranks)]


def send_keys(groups: Sequence[Group], settings: TrainerSettings, ranks: int) -> list[bytes]:
    """Return what each rank of the trainer is sent of groups whose tokens it has."""
    in_use = LeasesInUse(leases=frozenset(range(len(groups))), next_lease=2 * len(groups))
    step = stored_batch(trained_trajectories(groups, normalize_std=True), in_use=in_use)
    return [pickle.dumps(step) for _ in range(ranks)]


SEND: Final[dict[str, Callable[[Sequence[Group], TrainerSettings, int], list[bytes]]]] = {
    LISTS: send_lists,
    KEYS: send_keys,
}


def count_objects(value: object, seen: set[int] | None = None) -> int:
    """Count the Python objects that a value consists of; classes and what they share are not counted."""
    seen = set() if seen is None else seen
    if id(value) in seen or isinstance(value, type):
        return 0
    seen.add(id(value))
    parts: list[Any] = []
    if isinstance(value, dict):
        parts = [*value.keys(), *value.values()]
    elif isinstance(value, list | tuple | set | frozenset):
        parts = list(value)
    elif not isinstance(value, Ending):
        parts = [getattr(value, name) for name in getattr(type(value), "__slots__", ())]
    return 1 + sum(count_objects(part, seen) for part in parts)


def measure(plan: Plan, measurements: Measurements) -> None:
    """Run the controller's part of a step of each kind, round after round."""
    with tempfile.TemporaryDirectory(prefix="ropewalk-controller-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        length = max(4096, plan.tokens)
        config = Config.model_validate(
            {
                "rollout": {
                    "max_length": length,
                    "batch_size": plan.trajectories,
                    "group_size": plan.group_size,
                },
                "trainer": {"tokens_per_pass": 4 * length},
                "monarch": {"roles": {"trainer": {"procs": plan.ranks}}},
            }
        )
        settings = TrainerSettings(config=config, model_path=folder, folder=folder, max_loss_tokens=length)
        received = {kind: make_results(plan, with_tokens=kind == LISTS) for kind in SEND}
        tokens = plan.trajectories * plan.tokens
        for _, kind in in_rounds(plan.rounds, tuple(SEND)):
            began = time.process_time()
            groups = receive(received[kind])
            sent = SEND[kind](groups, settings, plan.ranks)
            cpu_s = time.process_time() - began
            measurements.add(CPU, kind, "", 1e9 * cpu_s / tokens)
            measurements.add(BYTES, kind, "", sum(map(len, [*received[kind], *sent])) / tokens)
            measurements.add(OBJECTS, kind, "", count_objects(groups) / plan.trajectories)


def derive(measurements: Measurements) -> None:
    """Add how many times as much the lists cost."""
    for figure in (CPU, BYTES):
        before, now = (measurements.median(figure, kind) for kind in (LISTS, KEYS))
        measurements.add(f"{figure}, lists over it", KEYS, "", ratio(before, now))


def bars(measurements: Measurements) -> Iterator[Bar]:
    """Yield every bar that this run has measurements for."""
    for figure in (CPU, BYTES):
        name = f"{figure}, lists over it"
        yield from at_least(name, measurements.median(name, KEYS), 15)


BENCHMARK = Benchmark(about=__doc__, plan=Plan, sections=(measure,), tables=TABLES, bars=bars, derive=derive)

if __name__ == "__main__":
    main("controller")
