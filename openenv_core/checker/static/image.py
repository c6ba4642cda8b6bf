"""What an image says of itself, without starting it."""

from typing import Any, Final

from openenv_core.checker.check import CheckFailed, Level, NotApplicable, check
from openenv_core.checker.subject import Subject
from openenv_core.targets import TargetKind, exposed_port

LARGEST_BYTES: Final = 10 * 1024**3
"""Beyond this an image is seldom what its author meant: models and data are mounted, not built in."""


@check(Level.STATIC)
def check_image_user(subject: Subject) -> str:
    """The image runs as another user than root."""
    user = str(_config(subject).get("User") or "")
    if user.partition(":")[0] in ("", "0", "root"):
        raise CheckFailed(
            f"expected an image whose user is not root, got {f'user {user!r}' if user else 'no user'}",
            change="end the Dockerfile with `USER env`, and build again",
        )
    return user


@check(Level.STATIC)
def check_image_health(subject: Subject) -> None:
    """The image tells whether its server is healthy."""
    test = (_config(subject).get("Healthcheck") or {}).get("Test") or []
    if not test or test[0] == "NONE":
        raise CheckFailed(
            "expected an image with a HEALTHCHECK, got none",
            change='add `HEALTHCHECK CMD ["healthcheck"]` to the Dockerfile on our base, and build again',
        )


@check(Level.STATIC)
def check_image_port(subject: Subject) -> str:
    """The image exposes the port that it serves."""
    exposed = sorted(_config(subject).get("ExposedPorts") or {})
    port = exposed_port(subject.target.text)
    if f"{port}/tcp" not in exposed:
        raise CheckFailed(
            f"expected an image that exposes one port, or {port} among them, got {', '.join(exposed) or 'none'}",
            change=f"add `EXPOSE {port}` to the Dockerfile, and build again",
        )
    return str(port)


@check(Level.STATIC)
def check_image_size(subject: Subject) -> str:
    """The image is small enough to be pulled while somebody waits."""
    size = int(_image(subject).get("Size") or 0)
    if size > LARGEST_BYTES:
        raise CheckFailed(
            f"expected an image of at most {_megabytes(LARGEST_BYTES)}, got {_megabytes(size)}",
            change="build in stages, leave caches and compilers behind, and mount models and data",
        )
    return _megabytes(size)


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"


def _image(subject: Subject) -> dict[str, Any]:
    if subject.kind is not TargetKind.IMAGE:
        raise NotApplicable(f"there is no image to look into, for a target of kind {subject.kind}")
    from openenv_core.providers.docker.engine import Engine

    found: dict[str, Any] = Engine.find().call("GET", f"/images/{subject.target.text}/json")
    return found


def _config(subject: Subject) -> dict[str, Any]:
    found: dict[str, Any] = _image(subject).get("Config") or {}
    return found
