"""An empty note is waited for."""

CAUGHT_BY = "valid_actions_are_survived"
STEP_TIMEOUT_S = 10.0
CHANGES = {
    "server/environment.py": {
        "import random\n": "import random\nimport time\n",
        "        self._guesses.append(": "        while not action.note:\n"
        "            time.sleep(0.1)\n"
        "        self._guesses.append(",
    }
}
