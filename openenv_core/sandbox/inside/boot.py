"""Entry script of the zygote, `python -I -B boot.py DESCRIPTOR`; imports no more than the zygote needs."""

import sys
from pathlib import Path
from types import ModuleType


def prepare() -> None:
    """Make the parent packages importable without running their `__init__`, which would import pydantic."""
    sandbox = Path(__file__).resolve().parents[1]
    for name, folder in (("openenv_core", sandbox.parent), ("openenv_core.sandbox", sandbox)):
        module = ModuleType(name)
        module.__path__ = [str(folder)]
        sys.modules[name] = module


if __name__ == "__main__":
    # Python puts the script's folder first in the path; code must not be able to import from it.
    del sys.path[0:1]
    prepare()
    from openenv_core.sandbox.inside.zygote import main

    main(int(sys.argv[1]))
