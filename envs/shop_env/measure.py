"""What the solver and the baselines earn, without a server: `python -m envs.shop_env.measure --tasks 300`."""

import argparse
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

from openenv_core.tools import CallToolAction, CallToolObservation

from .baselines import BASELINES
from .server.environment import ShopEnvironment
from .solver import Call, solve

Play = Callable[[str, Call, random.Random], float]


def measure(policy: Play, split: str, tasks: int) -> tuple[float, float]:
    """Play the first tasks of a split, and return the mean reward and the mean number of calls."""
    environment, source = ShopEnvironment(), random.Random(0)

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


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line a policy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--split", default="test", choices=list(ShopEnvironment.SPLITS))
    parser.add_argument("--tasks", type=int, default=300)
    told = parser.parse_args(arguments)
    policies: dict[str, Play] = {"solver": lambda task, call, _: solve(task, call), **BASELINES}
    for name, policy in policies.items():
        reward, calls = measure(policy, told.split, told.tasks)
        sys.stdout.write(f"{name:24} mean reward {reward:.3f}, {calls:.1f} calls\n")


if __name__ == "__main__":
    main()
