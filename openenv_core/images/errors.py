"""What can go wrong with images.

    OpenEnvError
    └── ImageError
        ├── BuildFailed         a step of a Dockerfile failed, or the engine refused the build
        └── PushFailed          an image or a folder did not arrive
            ├── NotReached      nobody answers there
            ├── NotAllowed      they know us not, or do not let us write there
            └── NoSuchImage     there is nothing of that name here to push

That no engine answers is `EngineUnavailable`, as it is for containers.
"""

# ruff: noqa: N818 - the names say what happened; the tree says that they are errors

from collections.abc import Sequence
from typing import Final

from openenv_core.errors import OpenEnvError

TAIL_LINES: Final = 30
"""How much of a failed step's output an error shows."""


class ImageError(OpenEnvError):
    """The root of what goes wrong with images."""


class BuildFailed(ImageError):
    """A step of a Dockerfile failed, or the engine refused the build.

    Attributes:
        step: The instruction that failed; empty where none had begun.
        output: The last lines that it printed.
    """

    def __init__(self, message: str, *, step: str = "", output: Sequence[str] = (), remedy: str = "") -> None:
        self.step = step
        self.output = tuple(output[-TAIL_LINES:])
        parts = [message]
        if self.output:
            parts += ["--- the step's last output ---", *self.output, "---"]
        if remedy:
            parts.append(remedy)
        super().__init__("\n".join(parts))


class PushFailed(ImageError):
    """An image or a folder did not arrive where it was pushed to."""


class NotReached(PushFailed):
    """Nobody answers at that address."""


class NotAllowed(PushFailed):
    """The other side does not know us, or does not let us write there."""


class NoSuchImage(PushFailed):
    """The engine has no image of that name to push."""
