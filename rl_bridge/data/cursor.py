"""How far a dataset has been read, kept where the death of its process does not matter."""

import os
import struct
from pathlib import Path

from rl_bridge.errors import ConfigError

_NUMBER = struct.Struct(">q")


class CursorFile:
    """One number in a file. It is what the operating system keeps of it that counts: a machine that stops loses it.

    Args:
        path: Made where it is missing.

    Raises:
        ConfigError: It cannot be written.
    """

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(
                f"cannot keep the dataset's cursor in {str(path)!r}: {error.strerror}"
            ) from error

    def read(self) -> int:
        """The number; 0 where none was written."""
        data = os.pread(self._fd, _NUMBER.size, 0)
        return int(_NUMBER.unpack(data)[0]) if len(data) == _NUMBER.size else 0

    def write(self, number: int) -> None:
        """Keep another number."""
        os.pwrite(self._fd, _NUMBER.pack(number), 0)

    def close(self) -> None:
        """Give the file up."""
        os.close(self._fd)
