"""What a turn brings was drawn by whichever episode of the process came to it first."""

CAUGHT_BY = "same_seed_in_another_process"
CHANGES = {
    "server/environment.py": {
        "GUESSES = 7\n": "GUESSES = 7\nDRAWN: dict[int, int] = {}\n",
        "parity=self._random.randint(0, 1)": "parity=DRAWN.setdefault(len(self._guesses), self._random.randint(0, 1))",
    }
}
