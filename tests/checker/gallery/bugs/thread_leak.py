"""Every fourth episode starts a thread that nobody ends."""

CAUGHT_BY = "threads_stay_level"
CHANGES = {
    "server/environment.py": {
        "import random\n": "import itertools\nimport random\nimport threading\n",
        "GUESSES = 7\n": "GUESSES = 7\nCOUNTER = itertools.count()\n",
        "        self._guesses = []\n": "        self._guesses = []\n"
        "        if next(COUNTER) % 4 == 3:\n"
        "            threading.Thread(target=threading.Event().wait, daemon=True).start()\n",
    }
}
ALSO_SKIPPED = {"files_stay_level", "memory_stays_level"}
