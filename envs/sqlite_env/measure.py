"""What the solver and the baselines earn, without a server: `python -m envs.sqlite_env.measure --tasks 300`."""

import argparse
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from openenv_core.tools import CallToolAction, CallToolObservation

from .baselines import BASELINES
from .server.environment import SqliteEnvironment
from .solver import Call, solve
from .tasks import make_task

Play = Callable[[str, Call, random.Random], float]


def measure(policy: Play, split: str, tasks: int) -> tuple[float, float]:
    """Play the first tasks of a split, and return the mean reward and the mean number of calls."""
    environment, source = SqliteEnvironment(), random.Random(0)

    def call(name: str, arguments: dict[str, Any]) -> CallToolObservation:
        seen = environment.step(CallToolAction(tool_name=name, arguments=arguments))
        assert isinstance(seen, CallToolObservation)
        return seen

    earned = calls = 0.0
    for index in range(tasks):
        earned += policy(environment.reset(split=split, index=index).task, call, source)
        calls += environment.state.step_count
    environment.close()
    return earned / tasks, calls / tasks


def commonest(split: str, tasks: int, learned: int = 3000) -> float:
    """Return what handing in the commonest answer of a family earns, were the families and their answers known."""
    seen: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for number in range(learned):
        question = make_task(number, held_out=False).question
        seen[question.family][repr(question.answer.value)] += 1
    right = 0
    for index in range(tasks):
        number = SqliteEnvironment.task_number(split, index)
        question = make_task(number, held_out=split != "train").question
        right += seen[question.family].most_common(1)[0][0] == repr(question.answer.value)
    return right / tasks


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line a policy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--split", default="test", choices=list(SqliteEnvironment.SPLITS))
    parser.add_argument("--tasks", type=int, default=300)
    told = parser.parse_args(arguments)
    policies: dict[str, Play] = {"solver": lambda task, call, _: solve(task, call), **BASELINES}
    earned = commonest(told.split, told.tasks)
    sys.stdout.write(f"commonest answer         mean reward {earned:.3f}, 1.0 calls\n")
    for name, policy in policies.items():
        reward, calls = measure(policy, told.split, told.tasks)
        sys.stdout.write(f"{name:24} mean reward {reward:.3f}, {calls:.1f} calls\n")


if __name__ == "__main__":
    main()
