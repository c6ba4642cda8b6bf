"""The schema says of the guesses left that they are never fewer than four, which nothing checks."""

CAUGHT_BY = "observations_follow_schema"
CHANGES = {
    "models.py": {
        "    left: int = Field(ge=0, le=7)\n": '    left: int = Field(json_schema_extra={"minimum": 4})\n',
    }
}
ALSO_SKIPPED = {"http_follows_schema"}
