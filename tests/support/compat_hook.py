"""Removes the import hook of the released package's names, which a program keeps until its end."""

import sys

from openenv_core.compat.hook import Hook
from openenv_core.compat.names import module_for


def installed_hook() -> Hook | None:
    """Return the installed hook, if any."""
    return next((finder for finder in sys.meta_path if isinstance(finder, Hook)), None)


def uninstall_hook() -> None:
    """Remove the hook and the modules imported through it."""
    hook = installed_hook()
    if hook is None:
        return
    sys.meta_path.remove(hook)
    for name, module in list(sys.modules.items()):
        is_alias = getattr(getattr(module, "__spec__", None), "loader", None) is hook
        if is_alias or (name != getattr(module, "__name__", name) and module_for(name) is not None):
            del sys.modules[name]
            parent, _, child = name.rpartition(".")
            if parent in sys.modules:
                sys.modules[parent].__dict__.pop(child, None)
