"""What counts as a leak: growth that goes on. Windows are made up here; real servers are in the gallery."""

import random
from itertools import accumulate
from pathlib import Path

import gallery
import pytest

from openenv_core.checker.catalogue import chosen
from openenv_core.checker.load.growth import Growth, leaks_memory, leaks_things
from openenv_core.checker.runner import BAD, run_check
from openenv_core.checker.subject import Subject

MIB = 1 << 20
PAGE = 4096
LOAD = ("threads_stay_level", "files_stay_level", "memory_stays_level")


def growth(*values: int, episodes: int = 100) -> Growth:
    return Growth(values, episodes)


def test_a_kilobyte_an_episode_is_a_leak() -> None:
    found = growth(*(50 * MIB + window * 100 * 1024 for window in range(7)))
    assert leaks_memory(found)
    assert round(found.slope) == 1024


def test_a_leak_is_seen_through_noise() -> None:
    noise = random.Random(1)
    values = [50 * MIB + window * 100 * 1024 + noise.randrange(-5, 6) * PAGE for window in range(7)]
    assert leaks_memory(growth(*values))


@pytest.mark.parametrize(
    "values",
    [
        (50 * MIB,) * 7,
        (50 * MIB, 50 * MIB, 50 * MIB, 58 * MIB, 58 * MIB, 58 * MIB, 58 * MIB),  # one jump
        (50 * MIB, 54 * MIB, 55 * MIB, 55 * MIB, 55 * MIB, 55 * MIB, 55 * MIB),  # a cache that has filled
        (50 * MIB, 51 * MIB, 50 * MIB, 51 * MIB, 50 * MIB, 51 * MIB, 50 * MIB),  # garbage that comes and goes
        (57 * MIB, 56 * MIB, 55 * MIB, 54 * MIB, 53 * MIB, 52 * MIB, 51 * MIB),
        tuple(50 * MIB + window * PAGE for window in range(7)),  # a page a window
    ],
)
def test_what_is_no_leak(values: tuple[int, ...]) -> None:
    assert not leaks_memory(growth(*values))


def test_pages_that_allocators_take_and_give_are_no_leak() -> None:
    for seed in range(200):
        steps = random.Random(seed)
        walk = accumulate((steps.randrange(-3, 4) * PAGE for _ in range(6)), initial=50 * MIB)
        assert not leaks_memory(growth(*walk))


def test_threads_and_files_leak_by_few() -> None:
    assert leaks_things(growth(10, 10, 11, 11, 12, 12, 13))
    assert not leaks_things(growth(10, 12, 10, 11, 10, 12, 10))
    assert not leaks_things(growth(10, 10, 10, 10, 10, 10, 14))  # the last sessions still closing
    assert not leaks_things(growth(10, 11, 12, 12, 12, 12, 12))  # a pool that has filled


VARIANTS = {
    "small_leak": (
        "a kilobyte an episode, for ever",
        {
            "        self._guesses = []\n": "        self._guesses = []\n        PAST.append(os.urandom(1000))\n"
        },
        {"memory_stays_level"},
    ),
    "rare_thread": (
        "one thread in a hundred episodes",
        {
            "        self._guesses = []\n": "        self._guesses = []\n        PAST.append(b'')\n"
            "        if len(PAST) % 100 == 0:\n"
            "            threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        },
        {"threads_stay_level"},
    ),
    "bounded_history": (
        "six hundred episodes are remembered, and no more",
        {
            "        self._guesses = []\n": "        self._guesses = []\n        PAST.append(os.urandom(4000))\n"
            "        del PAST[:-600]\n"
        },
        set(),
    ),
    "cycles": (
        "rings of objects, which wait for the collector",
        {
            "        self._guesses = []\n": "        self._guesses = []\n"
            "        ring: list[object] = [os.urandom(8000)]\n        ring.append(ring)\n"
        },
        set(),
    ),
}


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", VARIANTS)
def test_a_thousand_episodes_tell_small_leaks_from_none(name: str, tmp_path: Path) -> None:
    _, changes, expected = VARIANTS[name]
    head = {
        "import random\n": "import os\nimport random\nimport threading\n",
        "GUESSES = 7\n": "GUESSES = 7\nPAST: list[bytes] = []\n",
    }
    bug = gallery.Bug(name, "", {"server/environment.py": {**head, **changes}}, frozenset())
    with Subject.of(gallery.build(tmp_path, bug)) as subject:
        results = [run_check(subject, check) for check in chosen(names=LOAD)]
    assert {one.check: one.message for one in results if one.status in BAD}.keys() == expected
