"""An object of this process behind the surface of a service."""

import inspect
from collections.abc import Mapping
from typing import Any

from rl_bridge.services.surface import Fanout, Routed


class LocalService(Routed):
    """Gives an object's public methods `.route` and `.fanout`; it is its own only replica, with the id 0.

    Args:
        wrapped: The object; its methods may be coroutines.
    """

    def __init__(self, wrapped: object) -> None:
        self._wrapped = wrapped

    @property
    def endpoints(self) -> frozenset[str]:
        """The names that can be called."""
        public = (name for name in dir(type(self._wrapped)) if not name.startswith("_"))
        return frozenset(name for name in public if callable(getattr(type(self._wrapped), name)))

    async def _route(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        value = getattr(self._wrapped, name)(*args, **kwargs)
        return await value if inspect.isawaitable(value) else value

    async def _fan_out(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Fanout:
        return Fanout({0: await self._route(name, args, kwargs)}, {})
