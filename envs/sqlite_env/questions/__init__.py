"""Questions: their families, and drawing and wording a question."""

from . import families
from .answers import ExpectedAnswer, Kind
from .asking import (
    FAMILIES,
    Question,
    QuestionFamily,
    draw_family_question,
    draw_question,
    format_rules,
    phrase,
)

__all__ = [
    "FAMILIES",
    "ExpectedAnswer",
    "Kind",
    "Question",
    "QuestionFamily",
    "draw_family_question",
    "draw_question",
    "families",
    "format_rules",
    "phrase",
]
