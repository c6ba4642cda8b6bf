"""The questions: their families by name, and how one is drawn and put into words."""

from . import easy, hard, medium
from .answers import Answer, Kind
from .asking import Question, ask, ask_of
from .family import (
    FAMILIES,
    Family,
    Level,
    spoken,
)

__all__ = [
    "FAMILIES",
    "Answer",
    "Family",
    "Kind",
    "Level",
    "Question",
    "ask",
    "ask_of",
    "easy",
    "hard",
    "medium",
    "spoken",
]
