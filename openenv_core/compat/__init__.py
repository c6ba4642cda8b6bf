"""Runs environment folders written for the released package without that package.

    from openenv_core import compat

    compat.install()
    from openenv.core.env_server.types import Action   # openenv_core.Action

`python -m openenv_core.compat COMMAND` does the same in every Python process of a command.

Importing this module is cheap and has no effect. docs/compatibility.md lists the names.
"""

import sys
from importlib.machinery import PathFinder
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path
from typing import Final

from openenv_core.compat.hook import Hook, NotProvidedError
from openenv_core.compat.names import FORMER, RELEASED
from openenv_core.errors import ConfigurationError

__all__ = ["NotProvidedError", "check", "install", "released"]

_DISTRIBUTIONS: Final = ("openenv", "openenv-core")


def released() -> str | None:
    """Return a description of the installed released package; None if it is not installed."""
    for name in _DISTRIBUTIONS:
        try:
            version = Distribution.from_name(name).version
        except PackageNotFoundError:
            continue
        return f"{name} {version}"
    spec = PathFinder.find_spec(RELEASED)
    # A folder of that name without an __init__.py is not a package.
    if spec is not None and spec.origin is not None:
        return f"a package {RELEASED!r} at {Path(spec.origin).parent}"
    return None


def check() -> None:
    """Check that the released package is not installed.

    Raises:
        ConfigurationError: It is installed: its names would be ambiguous, and its wheel contains a package
            `openenv_core` that overwrites ours.
    """
    if (distribution := released()) is not None:
        raise ConfigurationError(
            f"expected Ropewalk without the released OpenEnv package, got {distribution} in the same environment "
            f"({sys.prefix}): both bring a package {FORMER!r}, and one overwrites the other; pip uninstall openenv "
            "openenv-core, then pip install --force-reinstall --no-deps ropewalk, or keep each in a virtual "
            "environment of its own"
        )


def install() -> Hook:
    """Provide the released package's import paths from now on.

    Installed packages add names by the entry points `ropewalk.compat`, as `servers` does those of the server's side.

    Raises:
        ConfigurationError: The released package is installed too.
    """
    hook = next((finder for finder in sys.meta_path if isinstance(finder, Hook)), None)
    if hook is None:
        check()
        hook = Hook()
        # First, so that a plain folder called "openenv" on the path is not imported as the package.
        sys.meta_path.insert(0, hook)
    return hook
