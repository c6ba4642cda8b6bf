"""A seat is given back at the end of an episode, and never where a session ends before."""

CAUGHT_BY = "disconnect_gives_the_slot_back"
CHANGES = {
    "server/environment.py": {
        "    DETERMINISTIC = True\n": "    DETERMINISTIC = True\n    _seats = 28\n",
        "        self._guesses: list[int] = []\n": "        self._guesses: list[int] = []\n"
        "        self._seated = False\n",
        "        self._random = random.Random(seed)\n": "        if not self._seated:\n"
        "            if GuessEnvironment._seats == 0:\n"
        '                raise EnvironmentFailure("no seat is free")\n'
        "            GuessEnvironment._seats -= 1\n"
        "            self._seated = True\n"
        "        self._random = random.Random(seed)\n",
        "        word = ": "        if self._state.done:\n"
        "            GuessEnvironment._seats += 1\n"
        "            self._seated = False\n"
        "        word = ",
    }
}
