"""Every episode leaves four kilobytes in a list of the module."""

CAUGHT_BY = "memory_stays_level"
CHANGES = {
    "server/environment.py": {
        "import random\n": "import os\nimport random\n",
        "GUESSES = 7\n": "GUESSES = 7\nPAST: list[bytes] = []\n",
        "        self._guesses = []\n": "        self._guesses = []\n        PAST.append(os.urandom(4000))\n",
    }
}
