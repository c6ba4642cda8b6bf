"""`python -m openenv_core MODULE [ARGUMENT ...]` is `python -m MODULE` for a module of ours; see `packages`."""

import runpy
import sys

from openenv_core.packages import prefer_ours

if __name__ == "__main__":
    prefer_ours()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
