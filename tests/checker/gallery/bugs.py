"""The planted bugs: texts that are replaced in the good environment, and the check that has to find each."""

from collections.abc import Mapping
from dataclasses import dataclass, field

STEP_TIMEOUT_S = 30.0
"""For a reply that comes: a check that runs out of it would be taken for one that caught a bug."""


@dataclass(frozen=True)
class Bug:
    """A bug, by its name; the sentence says what is wrong. Texts are replaced in server/environment.py and in files."""

    name: str
    sentence: str
    caught_by: str
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    also_caught_by: frozenset[str] = frozenset()
    also_skipped: frozenset[str] = frozenset()
    """Checks that then have nothing to look at any more."""
    step_timeout_s: float = STEP_TIMEOUT_S


BUGS = [
    Bug(
        "abort_on_huge",
        "A huge number ends the process, as one does that reaches a careless library in C.",
        "valid_actions_are_survived",
        {
            "import random\n": "import os\nimport random\n",
            "        self._guesses.append(": "        if abs(action.number) >= 2**62:\n"
            "            os._exit(134)\n"
            "        self._guesses.append(",
        },
    ),
    Bug(
        "eight_tables",
        "There are eight tables, and the ninth session sits down at the first one's.",
        "sessions_are_separate",
        {
            "import random\n": "import itertools\nimport random\n",
            "GUESSES = 7\n": "GUESSES = 7\nCOUNTER = itertools.count()\nTABLES: dict[int, int] = {}\n",
            "        self._number = 0\n": "        self._table = next(COUNTER) % 8\n",
            "        self._number = self._random": "        TABLES[self._table] = self._random",
            "action.number == self._number": "action.number == TABLES[self._table]",
            "action.number < self._number": "action.number < TABLES[self._table]",
        },
        also_caught_by=frozenset(["forks_go_their_own_way"]),
    ),
    Bug(
        "file_leak",
        "Every fourth episode opens a file that nobody closes.",
        "resources_stay_level",
        {
            "import random\n": "import itertools\nimport os\nimport random\n",
            "GUESSES = 7\n": "GUESSES = 7\nCOUNTER = itertools.count()\n",
            "        self._guesses = []\n": "        self._guesses = []\n"
            "        if next(COUNTER) % 4 == 3:\n"
            "            os.open(os.devnull, os.O_RDONLY)\n",
        },
    ),
    Bug(
        "global_generator",
        "Everybody draws from the module's generator, which each reset seeds.",
        "sessions_are_separate",
        {
            "self._random = random.Random(seed)": "random.seed(seed)",
            "self._random.randint(1, 100)": "random.randint(1, 100)",
            "self._random.randint(0, 1)": "random.randint(0, 1)",
        },
        also_caught_by=frozenset(["forks_go_their_own_way"]),
    ),
    Bug(
        "hashed_seed",
        "The seed goes through hash() of a text, which differs from one process to the next.",
        "same_seed_in_another_process",
        {"random.Random(seed)": 'random.Random(hash(f"deal {seed}"))'},
    ),
    Bug(
        "memory_leak",
        "Every episode leaves four kilobytes in a list of the module.",
        "resources_stay_level",
        {
            "import random\n": "import os\nimport random\n",
            "GUESSES = 7\n": "GUESSES = 7\nPAST: list[bytes] = []\n",
            "        self._guesses = []\n": "        self._guesses = []\n        PAST.append(os.urandom(4000))\n",
        },
    ),
    Bug(
        "other_when_served",
        "A shortcut for tests that is left in: outside of a server the number is one of ten.",
        "same_seed_in_another_process",
        {
            "import random\n": "import random\nimport sys\n",
            "self._random.randint(1, 100)": 'self._random.randint(1, 100 if "uvicorn" in sys.modules else 10)',
        },
    ),
    Bug(
        "reset_keeps",
        "A reset leaves the guesses of the episode before.",
        "reset_forgets",
        {"        self._guesses = []\n": "        self._guesses = self._guesses[-3:]\n"},
    ),
    Bug(
        "seed_ignored",
        "Every episode is that of one seed.",
        "different_seeds_differ",
        {"random.Random(seed)": "random.Random(7)"},
    ),
    Bug(
        "shared_list",
        "Observations hold the environment's own list, which goes on to change.",
        "observations_serialisable",
        {
            "        return Hint(\n": "        return Hint.model_construct(\n            metadata={},\n",
            "guesses=list(self._guesses)": "guesses=self._guesses",
        },
    ),
    Bug(
        "thread_leak",
        "Every fourth episode starts a thread that nobody ends.",
        "resources_stay_level",
        {
            "import random\n": "import itertools\nimport random\nimport threading\n",
            "GUESSES = 7\n": "GUESSES = 7\nCOUNTER = itertools.count()\n",
            "        self._guesses = []\n": "        self._guesses = []\n"
            "        if next(COUNTER) % 4 == 3:\n"
            "            threading.Thread(target=threading.Event().wait, daemon=True).start()\n",
        },
    ),
    Bug(
        "twins",
        "A fork has the original's own list of guesses, and its own generator.",
        "forks_go_their_own_way",
        {
            "    def close(self)": "    def snapshot(self) -> dict[str, object]:\n"
            '        """Everything."""\n'
            "        return dict(vars(self))\n\n"
            "    def restore(self, state: dict[str, object]) -> None:\n"
            '        """The same."""\n'
            "        vars(self).update(state)\n\n"
            "    def close(self)",
        },
    ),
    Bug(
        "unseeded",
        "The seed is taken and forgotten: the generator is seeded by the clock.",
        "same_seed_same_episode",
        {"self._random = random.Random(seed)": "self._random = random.Random()"},
        also_skipped=frozenset(
            [
                "different_seeds_differ",
                "reset_forgets",
                "same_seed_in_another_process",
            ]
        ),
    ),
]
