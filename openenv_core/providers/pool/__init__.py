"""Healthy containers that wait to be used."""

from openenv_core.providers.pool.keeper import PoolClosedError, PoolError, PoolLease, PoolTimeoutError
from openenv_core.providers.pool.pool import DockerPool

__all__ = ["DockerPool", "PoolClosedError", "PoolError", "PoolLease", "PoolTimeoutError"]
