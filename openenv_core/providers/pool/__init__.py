"""Healthy containers that wait to be used."""

from openenv_core.providers.pool.keeper import (
    Lease,
    PoolClosed,
    PoolError,
    PoolTimeout,
)
from openenv_core.providers.pool.pool import DockerPool

__all__ = ["DockerPool", "Lease", "PoolClosed", "PoolError", "PoolTimeout"]
