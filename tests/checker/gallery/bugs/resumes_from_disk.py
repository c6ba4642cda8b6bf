"""An episode is saved under its id, and goes on from there in whatever process asks for it."""

CAUGHT_BY = "kill_and_restart"
CHANGES = {
    "server/environment.py": {
        "import random\n": "import json\nimport random\nfrom pathlib import Path\n",
        "        self._guesses: list[int] = []\n": "        self._guesses: list[int] = []\n"
        "        self._file: Path | None = None\n",
        "        self._guesses = []\n": "        self.close()\n        self._guesses = []\n"
        "        if episode_id:\n"
        '            self._file = Path(__file__).with_name(f"{episode_id}.save")\n'
        "            if self._file.exists():\n"
        "                self._guesses = json.loads(self._file.read_text())\n",
        "        self._state.step_count += 1\n": "        self._state.step_count += 1\n"
        "        if self._file:\n"
        "            self._file.write_text(json.dumps(self._guesses))\n",
        '        """Give nothing back: there is nothing."""\n': '        """Forget what was saved."""\n'
        "        if self._file:\n"
        "            self._file.unlink(missing_ok=True)\n",
    }
}
