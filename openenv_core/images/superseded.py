"""Images of ours that a new build takes the names of, and their removal."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from openenv_core.images.engine import inspect

if TYPE_CHECKING:
    import docker

PARTS: Final = "ropewalk.parts"
"""The label of the base's first stage, which stays behind nameless as the engine's cache."""

YOUNG_S: Final = 600
"""Seconds in which a first stage may still be waited for by another build on this engine."""

_OURS: Final = "ropewalk."


@contextlib.contextmanager
def replacing(api: "docker.APIClient", tags: Sequence[str]) -> Iterator[None]:
    """Remove what had these names before the block, where it ended well and nothing needs that any more.

    Only images that `ropewalk build` made are removed. One that has another name, that a container was made of, or
    that another image stands on stays; it goes when the last of those is built anew.
    """
    before = {found for tag in tags if (found := _ours(api, tag)) is not None}
    yield
    for image in before:
        _remove(api, image)
    _remove_old_parts(api)


def _ours(api: "docker.APIClient", tag: str) -> str | None:
    from docker.errors import ImageNotFound

    try:
        found = inspect(api, tag)
    except ImageNotFound:
        return None
    labels = (found.get("Config") or {}).get("Labels") or {}
    return str(found["Id"]) if any(name.startswith(_OURS) for name in labels) else None


def _remove(api: "docker.APIClient", image: str) -> None:
    """Remove an image without names, and what was only its own of the steps below."""
    from docker.errors import APIError

    # What cannot be removed is left: the build itself has gone well.
    with contextlib.suppress(APIError, OSError):
        found = inspect(api, image)
        if not found.get("RepoTags") and not found.get("RepoDigests"):
            api.remove_image(image)


def _remove_old_parts(api: "docker.APIClient") -> None:
    """Keep the newest of the first stages, which the next base is made from, and those that may be in use."""
    from docker.errors import APIError

    parts: list[dict[str, Any]] = []
    with contextlib.suppress(APIError, OSError):
        parts = api.images(filters={"dangling": True, "label": PARTS})
    parts.sort(key=lambda one: one["Created"], reverse=True)
    for one in parts[1:]:
        if one["Created"] < time.time() - YOUNG_S:
            _remove(api, one["Id"])
