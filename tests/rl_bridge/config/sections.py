"""Which keys of the schema are sections."""

import typing
from typing import Any

from rl_bridge.config.sections import Section


def section_of(annotation: Any) -> type[Section] | None:
    """The section that a field is, or may be: `EnvConfig | None` is one too, and what stands in an `Annotated`."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next(filter(None, map(section_of, typing.get_args(annotation))), None)
