"""Observations hold the environment's own list, which goes on to change."""

CAUGHT_BY = "observations_stay"
CHANGES = {
    "server/environment.py": {
        "        return Hint(\n": "        return Hint.model_construct(\n            metadata={},\n",
        "guesses=list(self._guesses)": "guesses=self._guesses",
    }
}
