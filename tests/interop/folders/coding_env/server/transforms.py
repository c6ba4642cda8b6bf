"""What code is worth: a bonus for brevity, a penalty for a forbidden import."""

from openenv.core.env_server.base_transforms import CompositeTransform
from openenv.core.env_server.interfaces import Transform
from openenv.core.env_server.types import Observation

SHORT = 80


class Brevity(Transform):
    def __call__(self, observation: Observation) -> Observation:
        if (code := observation.metadata.get("last_code")) is not None:
            observation.reward = (observation.reward or 0.0) + (0.1 if len(code) <= SHORT else 0.0)
        return observation


class Caution(Transform):
    def __call__(self, observation: Observation) -> Observation:
        if "import socket" in observation.metadata.get("last_code", ""):
            observation.reward = (observation.reward or 0.0) - 1.0
            observation.metadata["violation"] = "socket"
        return observation


def careful() -> CompositeTransform:
    return CompositeTransform([Brevity(), Caution()])
