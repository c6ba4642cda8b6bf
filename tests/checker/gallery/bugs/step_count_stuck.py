"""Wrong guesses alone are counted as steps."""

CAUGHT_BY = "state_counts_steps"
CHANGES = {
    "server/environment.py": {
        "        self._state.step_count += 1\n": "        self._state.step_count += len(self._guesses) % 2\n",
    }
}
