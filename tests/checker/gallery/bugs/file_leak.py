"""Every fourth episode opens a file that nobody closes."""

CAUGHT_BY = "files_stay_level"
CHANGES = {
    "server/environment.py": {
        "import random\n": "import itertools\nimport os\nimport random\n",
        "GUESSES = 7\n": "GUESSES = 7\nCOUNTER = itertools.count()\n",
        "        self._guesses = []\n": "        self._guesses = []\n"
        "        if next(COUNTER) % 4 == 3:\n"
        "            os.open(os.devnull, os.O_RDONLY)\n",
    }
}
ALSO_SKIPPED = {"memory_stays_level"}
