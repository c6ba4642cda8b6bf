"""The protocols in which agents call a model: how each reads requests and writes replies."""

from rl_bridge.gateway.dialects.base import Dialect
from rl_bridge.gateway.dialects.chat import ChatDialect
from rl_bridge.gateway.dialects.messages import MessagesDialect
from rl_bridge.gateway.dialects.responses import ResponsesDialect

__all__ = ["ChatDialect", "Dialect", "MessagesDialect", "ResponsesDialect"]
