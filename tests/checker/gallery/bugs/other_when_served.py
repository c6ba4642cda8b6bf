"""A shortcut for tests that is left in: outside of a server the number is one of ten."""

CAUGHT_BY = "same_seed_over_the_wire"
CHANGES = {
    "server/environment.py": {
        "import random\n": "import random\nimport sys\n",
        "self._random.randint(1, 100)": 'self._random.randint(1, 100 if "uvicorn" in sys.modules else 10)',
    }
}
