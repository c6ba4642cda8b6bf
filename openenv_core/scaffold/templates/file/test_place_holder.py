"""Every check of `ropewalk validate place_holder.py`, as a test; they hold for other rules too."""

from pathlib import Path

from openenv_core.checker.suite import *  # noqa: F403
from openenv_core.checker.suite import environment_subject

subject = environment_subject(Path(__file__).with_name("place_holder.py"))
