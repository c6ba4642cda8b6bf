"""A solver that plays as a policy would: it reads the task, looks at the schema, asks SQL and hands in the answer.

It knows the questions' forms beforehand, and nothing of the episode but what tools tell it.
"""

from .play import Call, solve

__all__ = ["Call", "solve"]
