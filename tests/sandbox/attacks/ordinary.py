"""`python -m tests.sandbox.attacks.ordinary ...`: the catalogue as a user without any privileges, started as root.

Python may lie below a folder that other users do not enter. It is shown to this process alone, in a mount name space
of its own, at the place where it always was.
"""

import os
import sys
from pathlib import Path
from typing import Final

from openenv_core.sandbox.kernel.namespaces import uncover

USER: Final = 61_234
"""Nobody else's, so that what a session could do to this user's processes harms nobody."""

_REPOSITORY: Final = Path(__file__).resolve().parents[3]


def become_ordinary() -> None:
    """Become a user without privileges, for whom Python and this repository are still readable."""
    uncover([sys.base_prefix, sys.prefix, str(_REPOSITORY)])
    # Below a mount that was just made, the working directory is still the covered one.
    os.chdir(_REPOSITORY)
    os.setgroups([])
    os.setresgid(USER, USER, USER)
    os.setresuid(USER, USER, USER)


if __name__ == "__main__":
    become_ordinary()
    os.environ.update(HOME="/nonexistent", PYTHONDONTWRITEBYTECODE="1")
    os.execv(sys.executable, [sys.executable, "-m", "tests.sandbox.attacks", *sys.argv[1:]])
