"""What goes wrong with a pool.

ProviderError
└── PoolError          the pool cannot go on: its thread has died
    ├── PoolClosed     it was closed
    └── PoolTimeout    no container was free in time
"""

# ruff: noqa: N818 - named as the rest of the tree is: for what happened

from openenv_core.errors import ProviderError


class PoolError(ProviderError):
    """The pool hands out nothing any more."""


class PoolClosed(PoolError):
    """The pool was closed."""


class PoolTimeout(PoolError, TimeoutError):
    """No container was free in time. The pool goes on.

    Attributes:
        last_failure: What the last start that failed failed of; None where all succeeded.
    """

    def __init__(self, message: str, last_failure: BaseException | None = None) -> None:
        super().__init__(message)
        self.last_failure = last_failure
