"""A step after the end begins another episode that nobody asked for."""

CAUGHT_BY = "step_after_done"
CHANGES = {
    "server/environment.py": {
        "            raise EpisodeOver\n": "            self._state.done = False\n            self._guesses = []\n",
    }
}
