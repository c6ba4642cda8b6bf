"""Imports every module of core, servers and environments, then plays one episode of BlackJack.

`./scripts/test --all` runs this on a newer Python. Modules that import what no environment of CI has, or a trainer, are
left out.
"""

import importlib
import pkgutil

import envs
import openenv_core
import servers
from envs.blackjack_env import BlackjackAction, BlackjackEnv

LEFT_OUT = {
    *(f"openenv_core.adapters.{name}" for name in ("pettingzoo", "skyrl", "titan")),
    "openenv_core.providers.ray",
    "envs.pettingzoo_env.server",
}


def left_out(module: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in LEFT_OUT)


def main() -> None:
    for package in (openenv_core, servers, envs):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__") and not left_out(module.name):
                importlib.import_module(module.name)
    with BlackjackEnv.from_process() as env:
        result = env.reset(seed=7)
        while not result.done:
            result = env.step(BlackjackAction(action="stand"))
    assert result.reward in (-1, 0, 1, 1.5), result
    print("every module imported, one episode played")  # noqa: T201


if __name__ == "__main__":
    main()
