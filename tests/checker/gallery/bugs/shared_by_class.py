"""The hidden number belongs to the class, so that one session's reset hides another's anew."""

CAUGHT_BY = "sessions_are_separate"
CHANGES = {
    "server/environment.py": {
        "        self._number = self._random": "        GuessEnvironment._number = self._random",
        "        self._number = 0\n": "",
        "    DETERMINISTIC = True\n": "    DETERMINISTIC = True\n    _number = 0\n",
    }
}
ALSO_SKIPPED = {"sessions_at_once"}
