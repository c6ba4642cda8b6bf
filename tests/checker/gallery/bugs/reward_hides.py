"""An observation's own reward is a text, where the wire means a number."""

CAUGHT_BY = "reserved_fields"
CHANGES = {
    "models.py": {
        "    guesses: list[int]\n": "    guesses: list[int]\n"
        "    reward: str | float | None = None  # type: ignore[assignment]\n",
    }
}
