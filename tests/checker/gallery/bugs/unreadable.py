"""An observation breaks a rule of its own model: it goes out, and nobody who has the model can read it."""

CAUGHT_BY = "observations_serialisable"
CHANGES = {
    "models.py": {
        "    guesses: list[int]\n": "    guesses: list[int]\n\n"
        '    @field_validator("guesses")\n'
        "    @classmethod\n"
        "    def _few(cls, value: Any) -> Any:\n"
        "        if len(value) > 3:\n"
        '            raise ValueError("expected at most three guesses")\n'
        "        return value\n\n",
    },
    "server/environment.py": {
        "        return Hint(\n": "        return Hint.model_construct(\n            metadata={},\n",
    },
}
