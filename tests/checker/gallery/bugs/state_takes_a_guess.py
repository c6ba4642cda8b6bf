"""Reading the state takes up a guess."""

CAUGHT_BY = "state_is_only_read"
CHANGES = {
    "server/environment.py": {
        "        return self._state.model_copy()\n": "        if len(self._guesses) < GUESSES - 1:\n"
        "            self._guesses.append(0)\n"
        "        return self._state.model_copy()\n",
    }
}
