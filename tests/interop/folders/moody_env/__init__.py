"""An environment as authors write them for the released package: it imports nothing of ours."""

from .models import MoodAction, MoodObservation

__all__ = ["MoodAction", "MoodObservation"]
