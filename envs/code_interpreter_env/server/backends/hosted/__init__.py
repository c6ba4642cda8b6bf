"""What interpreters that run elsewhere have in common, whoever runs them.

Nothing here is a boundary: files travel through code in the session's own interpreter, which that code may have
changed. What comes back is bounded and checked for its form, and never trusted for more.
"""

from .collector import Collector, HostFailureError
from .interpreter import ExecutionEnd, HostedInterpreter

__all__ = ["Collector", "ExecutionEnd", "HostFailureError", "HostedInterpreter"]
