"""The tasks that come with the environment, one file per split.

Reference and wrong solutions are in the source tree's tests and not in the package, so that an installation contains
nothing that a submission could look up.
"""

from pathlib import Path
from typing import Final

SHIPPED: Final = Path(__file__).parent
"""The folder of these tasks, for `JsonlTasks`."""
