"""Every instance tells a host of its own beginning, which the manifest says it would not."""

CAUGHT_BY = "network_policy_holds"
CHANGES = {
    "server/environment.py": {
        "import random\n": "import random\nimport socket\nfrom contextlib import suppress\n",
        "        self._number = 0\n": "        self._number = 0\n"
        "        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as there:\n"
        '            there.sendto(b"begun", ("192.0.2.7", 8125))\n',
    }
}
