"""Kuhn poker as an environment of two players: the models and the client. The server is in :mod:`.server`.

Exact values, best responses and NashConv are in :mod:`.oracle`.
"""

from .client import KuhnEnv
from .models import KuhnAction, KuhnObservation

__all__ = ["KuhnAction", "KuhnEnv", "KuhnObservation"]
