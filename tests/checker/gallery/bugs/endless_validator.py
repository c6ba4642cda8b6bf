"""The validator of a note unwraps lists until there is none left, which of an empty one never comes."""

CAUGHT_BY = "invalid_actions_are_survived"
STEP_TIMEOUT_S = 10.0
CHANGES = {
    "models.py": {
        "    def _unwrapped(cls, value: Any) -> Any:\n": "    def _unwrapped(cls, value: Any) -> Any:\n"
        "        while isinstance(value, list):\n"
        "            value = value[0] if value else value\n",
    }
}
