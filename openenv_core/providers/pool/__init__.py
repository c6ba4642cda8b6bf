"""Healthy containers that wait to be used."""

from openenv_core.providers.pool.keeper import (
    PoolClosed,
    PoolError,
    PoolLease,
    PoolTimeout,
)
from openenv_core.providers.pool.pool import DockerPool

__all__ = ["DockerPool", "PoolClosed", "PoolError", "PoolLease", "PoolTimeout"]
