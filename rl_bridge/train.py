"""`python -m rl_bridge.train --config FILE`: `ropewalk train` without the installed command."""

import sys

from openenv_core.cli.main import run
from rl_bridge.cli.train import COMMAND

if __name__ == "__main__":
    sys.exit(run(COMMAND, sys.argv[1:]))
