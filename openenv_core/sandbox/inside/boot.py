"""Started as a script, `python -I -B boot.py DESCRIPTOR`: becomes the zygote without loading what it has no use for."""

import sys
from pathlib import Path
from types import ModuleType


def prepare() -> None:
    """Make the packages above importable without running their `__init__`, which would bring in pydantic."""
    sandbox = Path(__file__).resolve().parents[1]
    for name, folder in (("openenv_core", sandbox.parent), ("openenv_core.sandbox", sandbox)):
        module = ModuleType(name)
        module.__path__ = [str(folder)]
        sys.modules[name] = module


if __name__ == "__main__":
    # A script's folder comes first in the path; code must not be able to import from it.
    del sys.path[0:1]
    prepare()
    from openenv_core.sandbox.inside.zygote import main

    main(int(sys.argv[1]))
