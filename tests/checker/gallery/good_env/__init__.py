"""A hidden number: the good environment that every wrong one of the gallery differs from by one bug."""

from .client import GuessEnv
from .models import Guess, GuessState, Hint

__all__ = ["Guess", "GuessEnv", "GuessState", "Hint"]
