"""The checks of `ropewalk validate .`, one test per property."""

from pathlib import Path

from openenv_core.checker.suite import *  # noqa: F403
from openenv_core.checker.suite import environment_subject

subject = environment_subject(Path(__file__).parents[1])
