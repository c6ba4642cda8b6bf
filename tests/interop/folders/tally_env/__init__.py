"""An environment of tools as authors write them for the released package: it imports nothing of ours."""

from .client import TallyEnv

__all__ = ["TallyEnv"]
