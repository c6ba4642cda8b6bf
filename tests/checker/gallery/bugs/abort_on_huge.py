"""A huge number ends the process, as one does that reaches a careless library in C."""

CAUGHT_BY = "valid_actions_are_survived"
CHANGES = {
    "server/environment.py": {
        "import random\n": "import os\nimport random\n",
        "        self._guesses.append(": "        if abs(action.number) >= 2**62:\n"
        "            os._exit(134)\n"
        "        self._guesses.append(",
    }
}
