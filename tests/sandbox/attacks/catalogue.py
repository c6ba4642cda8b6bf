"""All attacks, by category."""

import platform
from dataclasses import replace
from types import ModuleType
from typing import Final

from openenv_core.sandbox import Isolation

from . import (
    archives,
    channel,
    cpu,
    files,
    information,
    kernel_api,
    memory,
    network,
    others,
    output,
    persistence,
    processes,
    rewards,
    signals,
)
from .model import Attack

_ROOMS: Final[tuple[ModuleType, ...]] = (
    files,
    network,
    processes,
    signals,
    others,
    memory,
    cpu,
    output,
    channel,
    rewards,
    persistence,
    archives,
    kernel_api,
    information,
)

CATALOGUE: Final[tuple[Attack, ...]] = tuple(
    replace(attack, category=room.__name__.rpartition(".")[2]) for room in _ROOMS for attack in room.ATTACKS
)


def selected(isolation: Isolation, *, slow: bool, pattern: str = "") -> list[Attack]:
    """Return the attacks that have to be contained at a level, on this machine."""
    return [
        attack
        for attack in CATALOGUE
        if isolation in attack.holds
        and attack.machine in (None, platform.machine())
        and (slow or not attack.slow)
        and pattern in attack.title
    ]
