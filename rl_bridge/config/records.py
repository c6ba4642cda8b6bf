"""`records.*`: which rollouts are kept to be read."""

from typing import Annotated

from pydantic import Field

from rl_bridge.config.section import Count, Section


class RecordsConfig(Section):
    """`records.*`: what `ropewalk rollouts` shows."""

    groups: Annotated[int, Field(ge=0)] = 2
    """Groups of every iteration that are kept whole, drawn at random; 0 keeps none."""
    max_mb: Count = 64
    """MiB of the run's folder that they may take. The first eighth stays; then the oldest ones go."""
