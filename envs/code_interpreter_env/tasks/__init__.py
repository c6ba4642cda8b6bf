"""The tasks that come with the environment, a file a split.

Their reference solutions, and wrong ones, are in the tests of the source tree and not in the package, so that no
installation holds what a submission could look for.
"""

from pathlib import Path
from typing import Final

SHIPPED: Final = Path(__file__).parent
"""The folder, for `JsonlTasks`."""
