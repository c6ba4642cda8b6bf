"""Which keys of the schema are sections."""

import typing
from typing import Any

from rl_bridge.config.section import Section


def section_of(annotation: Any) -> type[Section] | None:
    """The section that a field is, or may be: `EnvConfig | None` is one too."""
    candidates = typing.get_args(annotation) or (annotation,)
    return next((one for one in candidates if isinstance(one, type) and issubclass(one, Section)), None)
