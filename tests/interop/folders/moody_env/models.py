"""What is asked and what is answered."""

from typing import Any

from openenv.core.env_server.types import Action, Observation
from pydantic import field_validator


class MoodAction(Action):
    mood: str

    @field_validator("mood")
    @classmethod
    def not_forbidden(cls, value: str) -> str:
        if value == "forbidden":
            raise ValueError("this mood is forbidden")
        return value


class MoodObservation(Observation):
    said: Any = None
