"""The questions: their families by name, and how one is drawn and put into words."""

from . import families
from .answers import ExpectedAnswer, Kind
from .asking import FAMILIES, Question, QuestionFamily, ask, ask_of, phrase, rules

__all__ = [
    "FAMILIES",
    "ExpectedAnswer",
    "Kind",
    "Question",
    "QuestionFamily",
    "ask",
    "ask_of",
    "families",
    "phrase",
    "rules",
]
