"""All attacks, by category."""

import importlib
import platform
from dataclasses import replace
from typing import Final

from openenv_core.sandbox import Isolation

from .model import Attack

CATEGORIES: Final = (
    *("files", "network", "processes", "signals", "others", "memory", "cpu", "output", "channel", "rewards"),
    *("persistence", "archives", "kernel_api", "information"),
)

CATALOGUE: Final[tuple[Attack, ...]] = tuple(
    replace(attack, category=category)
    for category in CATEGORIES
    for attack in importlib.import_module(f".{category}", __package__).ATTACKS
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
