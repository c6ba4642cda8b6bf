"""A lock of the engine's goes into an observation."""

CAUGHT_BY = "observations_serialisable"
CHANGES = {
    "models.py": {"    guesses: list[int]\n": "    guesses: list[int]\n    engine: Any = None\n"},
    "server/environment.py": {
        "import random\n": "import random\nimport threading\n",
        "            guesses=list(self._guesses),\n": "            guesses=list(self._guesses),\n"
        "            engine=threading.Lock() if len(self._guesses) == 3 else None,\n",
    },
}
