"""Installs the compatibility hook when a released name is first imported.

`python -m openenv_core.compat` puts this file on the path of every Python process of a command, so it imports only the
standard library until then.
"""

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from types import ModuleType


class Waiting:
    """Installs the hook at the first import of a released name, and removes itself."""

    def find_spec(
        self, fullname: str, path: object = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Install the hook for a released name, and let it find the module."""
        root, _, below = fullname.partition(".")
        former = ("env_server", "client_types", "env_client", "http_env_client", "containers")
        if root != "openenv" and not (root == "openenv_core" and below.partition(".")[0] in former):
            return None
        sys.meta_path.remove(self)
        from openenv_core import compat

        return compat.install().find_spec(fullname, None)


def run_next() -> None:
    """Run the `sitecustomize` that this one hides."""
    own_folder = os.path.dirname(os.path.abspath(__file__))
    spec = PathFinder.find_spec("sitecustomize", [place for place in sys.path if place != own_folder])
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


if __name__ == "sitecustomize":
    sys.meta_path.insert(0, Waiting())
    run_next()
