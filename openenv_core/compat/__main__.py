"""`python -m openenv_core.compat`: run a command whose Python processes all find the released package's names."""

import os
import shutil
import sys
from pathlib import Path
from typing import Final, NoReturn

from openenv_core import compat
from openenv_core.errors import ConfigurationError

USAGE: Final = """\
usage: python -m openenv_core.compat COMMAND [ARGUMENT ...]

Run a command; it, and every Python process that it starts, imports the released OpenEnv package's names from Ropewalk.

  python -m openenv_core.compat python train.py
  python -m openenv_core.compat uvicorn my_env.server.app:app --port 8000
"""

FAILED: Final = 2


def main(argv: list[str]) -> NoReturn:
    """Replace this process by the command; exit with an error if that is impossible."""
    if not argv or argv[0] in ("-h", "--help"):
        (sys.stdout if argv else sys.stderr).write(USAGE)
        sys.exit(0 if argv else FAILED)
    # `python` means this interpreter, since Ropewalk is installed for it.
    program = sys.executable if argv[0] in ("python", "python3") else shutil.which(argv[0])
    try:
        compat.check()
        if program is None:
            raise ConfigurationError(f"expected a command, got {argv[0]!r}, which is none; see --help")
    except ConfigurationError as error:
        sys.stderr.write(f"ropewalk: {error}\n")
        sys.exit(FAILED)
    hook_folder = str(Path(__file__).with_name("everywhere"))
    path = os.pathsep.join(filter(None, [hook_folder, os.environ.get("PYTHONPATH", "")]))
    os.execve(program, [program, *argv[1:]], os.environ | {"PYTHONPATH": path})


if __name__ == "__main__":
    main(sys.argv[1:])
