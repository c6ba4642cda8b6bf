"""There are eight tables, and the ninth session sits down at the first one's."""

CAUGHT_BY = "sessions_at_once"
CHANGES = {
    "server/environment.py": {
        "import random\n": "import itertools\nimport random\n",
        "GUESSES = 7\n": "GUESSES = 7\nCOUNTER = itertools.count()\nTABLES: dict[int, int] = {}\n",
        "        self._number = 0\n": "        self._table = next(COUNTER) % 8\n",
        "        self._number = self._random": "        TABLES[self._table] = self._random",
        "action.number == self._number": "action.number == TABLES[self._table]",
        "action.number < self._number": "action.number < TABLES[self._table]",
    }
}
