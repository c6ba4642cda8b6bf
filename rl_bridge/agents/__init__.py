"""Agents that play environments with the policy as their model: programs, Python functions, and their episodes."""

from rl_bridge.agents.run import AgentRun

__all__ = ["AgentRun"]
