"""A place for what modules write while they are imported: caches, for the most part."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from openenv_core.sandbox.kernel import mounts, namespaces

_VARIABLES: Final = ("HOME", "TMPDIR", "MPLCONFIGDIR")
_BYTES: Final = 256 << 20


@contextmanager
def somewhere_to_write(scratch: str | None) -> Iterator[None]:
    """Have imports write into a folder that no session sees.

    Args:
        scratch: Where it is made; None: a file system of its own, at the place where sessions get theirs.
    """
    before = {name: os.environ.get(name) for name in _VARIABLES}
    if scratch is None:
        place = namespaces.WORKSPACE
        mounts.tmpfs(place, mounts.NO_SETUID | mounts.NO_DEVICES, size=_BYTES, mode="0700")
    else:
        place = tempfile.mkdtemp(prefix="zygote-", dir=scratch)
    os.environ.update(dict.fromkeys(_VARIABLES, place))
    tempfile.tempdir = None
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        tempfile.tempdir = None
        if scratch is None:
            mounts.detach(place)
