"""BlackJack as an environment: the models and the client. The server is in :mod:`.server`.

Exact returns and the optimal policy are in :mod:`.oracle`, baseline policies in :mod:`.baselines`.
"""

from .client import BlackjackEnv
from .models import (
    BlackjackAction,
    BlackjackObservation,
    BlackjackState,
)

__all__ = [
    "BlackjackAction",
    "BlackjackEnv",
    "BlackjackObservation",
    "BlackjackState",
]
