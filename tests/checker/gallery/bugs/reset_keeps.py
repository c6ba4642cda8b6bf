"""A reset leaves the guesses of the episode before."""

CAUGHT_BY = "reset_forgets"
CHANGES = {
    "server/environment.py": {
        "        self._guesses = []\n": "        self._guesses = self._guesses[-3:]\n",
    }
}
