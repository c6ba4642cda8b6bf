"""The companion of this process: removes its containers when it dies, whatever it dies of."""

from openenv_core.providers.docker._wire import Address


def ensure(address: Address) -> None:
    """Have a companion for the engine."""
