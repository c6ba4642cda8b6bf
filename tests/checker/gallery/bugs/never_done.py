"""The end is never told."""

CAUGHT_BY = "episode_ends"
CHANGES = {
    "server/environment.py": {
        "        self._state.done = right or len(self._guesses) >= GUESSES\n": ""
        "        self._guesses = self._guesses[-GUESSES:]\n",
    }
}
ALSO_SKIPPED = {"step_after_done"}
