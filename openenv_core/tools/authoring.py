"""What a class of tools may not do, said when the class is made."""

import inspect
from collections.abc import Iterable

from openenv_core.environment import Environment
from openenv_core.errors import ConfigurationError
from openenv_core.tools.declare import declared_as


def check_names(cls: type, *bases: type) -> None:
    """Hold declared methods against those by which a server reaches the environment.

    Raises:
        ConfigurationError: One has such a method's name, and would be called in its place.
    """
    taken = {name for base in (*bases, Environment) for name in dir(base)} | {"reset", "step"}
    for owner in cls.__mro__:
        for name in vars(owner).keys() & taken:
            if declared_as(vars(owner)[name]):
                raise ConfigurationError(
                    f"expected a method with a name of its own, got {owner.__qualname__}.{name}, which servers call "
                    f"for another reason; call the method otherwise, and declare it as name={name!r}"
                )


def check_hooks(cls: type, hooks: Iterable[str] = ("before_call", "after_call")) -> None:
    """Hold the hooks against what they are called as.

    Raises:
        ConfigurationError: One is asynchronous.
    """
    for name in hooks:
        if inspect.iscoroutinefunction(getattr(cls, name, None)):
            raise ConfigurationError(
                f"expected a plain {name}, got {cls.__qualname__}.{name}, which is asynchronous; what has to wait "
                "belongs in the tool"
            )
