"""`python -m openenv_core.cli` is `ropewalk`."""

import sys

from openenv_core.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
