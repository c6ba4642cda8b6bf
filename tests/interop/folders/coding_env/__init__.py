"""A coding environment as the released package's own is laid out: it imports nothing of ours."""

from .client import CodingEnv
from .models import CodeAction, CodeObservation, CodeState

__all__ = ["CodeAction", "CodeObservation", "CodeState", "CodingEnv"]
