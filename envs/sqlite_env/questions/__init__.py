"""The questions: their families by name, and how one is drawn and put into words."""

from . import easy, hard, medium
from .answers import ExpectedAnswer, Kind
from .asking import Question, ask, ask_of
from .family import FAMILIES, QuestionFamily, QuestionLevel, spoken

__all__ = [
    "FAMILIES",
    "ExpectedAnswer",
    "Kind",
    "Question",
    "QuestionFamily",
    "QuestionLevel",
    "ask",
    "ask_of",
    "easy",
    "hard",
    "medium",
    "spoken",
]
