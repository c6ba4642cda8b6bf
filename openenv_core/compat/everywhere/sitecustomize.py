"""Put first on Python's path by `python -m openenv_core.compat`; provides the released names when one is imported.

Until then it uses only the standard library, since it runs in every Python process below that command.
"""

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from types import ModuleType


class HookInstaller:
    """A finder that replaces itself by the hook at the first import of a released name."""

    def find_spec(
        self, fullname: str, path: object = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the hook's spec for a released name, otherwise None."""
        root, _, submodule = fullname.partition(".")
        former_roots = ("env_server", "client_types", "env_client", "http_env_client", "containers")
        if root != "openenv" and not (root == "openenv_core" and submodule.partition(".")[0] in former_roots):
            return None
        sys.meta_path.remove(self)
        from openenv_core import compat

        return compat.install().find_spec(fullname, None)


def run_next_sitecustomize() -> None:
    """Run the `sitecustomize` that this one shadows."""
    own_folder = os.path.dirname(os.path.abspath(__file__))
    spec = PathFinder.find_spec("sitecustomize", [place for place in sys.path if place != own_folder])
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


if __name__ == "sitecustomize":
    sys.meta_path.insert(0, HookInstaller())
    run_next_sitecustomize()
