"""A solver that works as a policy would: it reads what the customer writes and what tools tell, and acts by it.

It knows beforehand how customers speak and how policies are worded, and nothing else of the episode.
"""

from .play import solve
from .talk import Call

__all__ = ["Call", "solve"]
