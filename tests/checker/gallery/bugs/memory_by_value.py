"""What a guess may be decides how much memory it takes."""

CAUGHT_BY = "valid_actions_are_survived"
CHANGES = {
    "server/environment.py": {
        "        self._guesses.append(": "        _seen = [False] * action.number\n"
        "        self._guesses.append(",
    }
}
