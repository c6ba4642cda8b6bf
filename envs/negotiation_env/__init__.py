"""A negotiation over items as an environment of two players who talk: the models and the client.

Exact values of divisions are in :mod:`.division`; the server is in :mod:`.server`.
"""

from .client import NegotiationEnv
from .models import NegotiationAction, NegotiationObservation

__all__ = ["NegotiationAction", "NegotiationEnv", "NegotiationObservation"]
