"""The Dockerfile of a folder, and what its image says of itself."""

import re
from pathlib import Path
from typing import Any, Final

from openenv_core.checker.check import CheckError, CheckLevel, NotApplicableError, check
from openenv_core.checker.subject import Subject
from openenv_core.images.dockerfile import PLACES, Dockerfile
from openenv_core.images.leaving_out import has_secret, is_secret_name, read_rules
from openenv_core.targets import TargetKind, exposed_port

LARGEST_BYTES: Final = 10 * 1024**3
"""Beyond this an image is seldom what its author meant: models and data are mounted, not built in."""


@check(CheckLevel.STATIC)
def check_image_user(subject: Subject) -> str:
    """The image runs as another user than root."""
    user = str(_config(subject).get("User") or "")
    if user.partition(":")[0] in ("", "0", "root"):
        raise CheckError(
            f"expected an image whose user is not root, got {f'user {user!r}' if user else 'no user'}",
            change="end the Dockerfile with `USER env`, and build again",
        )
    return user


@check(CheckLevel.STATIC)
def check_image_health(subject: Subject) -> None:
    """The image tells whether its server is healthy."""
    test = (_config(subject).get("Healthcheck") or {}).get("Test") or []
    if not test or test[0] == "NONE":
        raise CheckError(
            "expected an image with a HEALTHCHECK, got none",
            change='add `HEALTHCHECK CMD ["healthcheck"]` to the Dockerfile on our base, and build again',
        )


@check(CheckLevel.STATIC)
def check_image_port(subject: Subject) -> str:
    """The image exposes the port that it serves."""
    exposed = sorted(_config(subject).get("ExposedPorts") or {})
    port = exposed_port(subject.target.text)
    if f"{port}/tcp" not in exposed:
        raise CheckError(
            f"expected an image that exposes one port, or {port} among them, got {', '.join(exposed) or 'none'}",
            change=f"add `EXPOSE {port}` to the Dockerfile, and build again",
        )
    return str(port)


@check(CheckLevel.STATIC)
def check_image_size(subject: Subject) -> str:
    """The image is small enough to be pulled while somebody waits."""
    size = int(_image(subject).get("Size") or 0)
    if size > LARGEST_BYTES:
        raise CheckError(
            f"expected an image of at most {_megabytes(LARGEST_BYTES)}, got {_megabytes(size)}",
            change="build in stages, leave caches and compilers behind, and mount models and data",
        )
    return _megabytes(size)


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"


def _image(subject: Subject) -> dict[str, Any]:
    if subject.kind is not TargetKind.IMAGE:
        raise NotApplicableError(f"there is no image to look into, for a target of kind {subject.kind}")
    from openenv_core.providers.docker.engine import DockerEngine

    found: dict[str, Any] = DockerEngine.find().call("GET", f"/images/{subject.target.text}/json")
    return found


def _config(subject: Subject) -> dict[str, Any]:
    found: dict[str, Any] = _image(subject).get("Config") or {}
    return found


OUR_PORT: Final = 8000
"""What our base image exposes."""

_SECRET_NAME: Final = re.compile(
    r"(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|PRIVATE_?KEY|CREDENTIAL)", re.IGNORECASE
)
_PORT: Final = re.compile(r"--port[ =\"',]+(?P<port>\d+)")


@check(CheckLevel.STATIC)
def check_dockerfile_present(subject: Subject) -> None:
    """The folder has a Dockerfile."""
    folder = subject.need_folder()
    if Dockerfile.find(folder, _named(subject)) is None:
        raise CheckError(
            f"expected a Dockerfile in {folder}, got none at {' or '.join(PLACES)}",
            change="add server/Dockerfile as `ropewalk init` writes it",
        )


@check(CheckLevel.STATIC)
def check_dockerfile_base(subject: Subject) -> str:
    """The base image can be chosen: ARG BASE_IMAGE, and a FROM that uses it."""
    file = _dockerfile(subject)
    if "BASE_IMAGE" not in file.arguments or "BASE_IMAGE" not in file.base_variables:
        raise CheckError(
            f"expected {_short(file)} to build on ARG BASE_IMAGE, got FROM {file.base or 'nothing'}",
            change="begin with `ARG BASE_IMAGE=ropewalk-base:latest` and `FROM ${BASE_IMAGE}`, so that whoever builds "
            "can pin it or build on their own",
        )
    return file.base_image


@check(CheckLevel.STATIC)
def check_dockerfile_user(subject: Subject) -> str:
    """The container runs as another user than root."""
    file = _dockerfile(subject)
    user = file.last("USER")
    if user is None and file.on_our_base:
        return "the base's own"
    name = file.resolved(user.rest).partition(":")[0] if user is not None else ""
    if name in ("", "0", "root"):
        whose = ", as the released `openenv init` writes it," if file.on_released_base else ""
        raise CheckError(
            f"expected {_short(file)}{whose} to end as another user than root, "
            f"got {f'USER {name}' if name else 'no USER'}",
            change="end with `USER env` on our base; elsewhere with a user of a number that you make: "
            "`RUN useradd --uid 10001 env` and `USER env`",
        )
    return name


@check(CheckLevel.STATIC)
def check_dockerfile_health(subject: Subject) -> None:
    """The image tells whether its server is healthy."""
    file = _dockerfile(subject)
    found = file.last("HEALTHCHECK")
    if found is None and file.on_our_base:
        return
    if found is None or found.rest.upper() == "NONE":
        raise CheckError(
            f"expected a HEALTHCHECK in {_short(file)}, got {'HEALTHCHECK NONE' if found else 'none'}",
            change='add `HEALTHCHECK CMD ["healthcheck"]` on our base; elsewhere ask GET /health with Python',
        )


@check(CheckLevel.STATIC)
def check_dockerfile_port(subject: Subject) -> str:
    """The image serves the port that the manifest names, and says so."""
    file, port = _dockerfile(subject), subject.promises.port
    exposed = {
        word.partition("/")[0]
        for one in file.final
        if one.word == "EXPOSE"
        for word in file.resolved(one.rest).split()
    }
    if file.on_our_base:
        exposed.add(str(OUR_PORT))
    started = " ".join(one.rest for one in (file.last("ENTRYPOINT"), file.last("CMD")) if one is not None)
    served = {match["port"] for match in _PORT.finditer(file.resolved(started))}
    if served and str(port) not in served:
        raise CheckError(
            f"expected {_short(file)} to serve port {port} of the manifest, got port {', '.join(sorted(served))}",
            change="let `port:` in openenv.yaml and the server's --port say the same",
        )
    if str(port) not in exposed:
        raise CheckError(
            f"expected {_short(file)} to expose port {port} of the manifest, got "
            f"{f'port {chr(44).join(sorted(exposed))}' if exposed else 'no EXPOSE'}",
            change=f"add `EXPOSE {port}`",
        )
    return str(port)


@check(CheckLevel.STATIC)
def check_dockerfile_sources(subject: Subject) -> None:
    """What goes into the image is in the folder: nothing is added from a URL."""
    file = _dockerfile(subject)
    for one in file.all:
        if one.word == "ADD" and re.search(r"(https?|ftp|git)(://|@)", file.resolved(one.rest)):
            raise CheckError(
                f"expected no ADD of a URL, got line {one.line} of {_short(file)}: ADD {one.rest}",
                change="fetch it in a RUN that checks its digest, or put it into the folder and COPY it",
            )


@check(CheckLevel.STATIC)
def check_dockerfile_secrets(subject: Subject) -> None:
    """No secret goes into the image."""
    file, folder = _dockerfile(subject), subject.need_folder()
    for one in [*file.all]:
        if one.word in ("ENV", "ARG"):
            name, _, value = (part.strip() for part in one.rest.replace(" ", "=", 1).partition("="))
            bare = value.strip("'\"")
            if (bare and _SECRET_NAME.search(name) and not bare.startswith("$")) or has_secret(one.rest):
                raise CheckError(
                    f"expected no secret in {_short(file)}, got {one.word} {name} with a value on line {one.line}",
                    change="take it out, revoke it if it was real, and give it to the container when it starts",
                )
        elif one.word == "RUN" and has_secret(one.rest):
            raise CheckError(
                f"expected no secret in {_short(file)}, got one on line {one.line}",
                change="take it out, revoke it, and use `RUN --mount=type=secret`",
            )
        elif one.word in ("COPY", "ADD") and (found := _secret_among(one.rest, folder)):
            raise CheckError(
                f"expected no secrets among what is copied, got {found} by line {one.line} of {_short(file)}: "
                f"{one.word} {one.rest}",
                change=f"add {found} to .dockerignore",
            )


def _named(subject: Subject) -> str | None:
    execution = subject.promises.validation.execution
    return None if execution is None else execution.dockerfile


def _dockerfile(subject: Subject) -> Dockerfile:
    found = Dockerfile.find(subject.need_folder(), _named(subject))
    if found is None:
        raise NotApplicableError("there is no Dockerfile")
    return found


def _short(file: Dockerfile) -> str:
    return file.path.name if file.path.parent.name != "server" else f"server/{file.path.name}"


def _secret_among(rest: str, folder: Path) -> str | None:
    """Return a file of the folder that a COPY takes along and that looks like a secret."""
    words = [word for word in rest.split() if not word.startswith("--")]
    if len(words) < 2 or rest.startswith(("--from", "<<")):
        return None
    ignored = read_rules(folder / ".dockerignore") if (folder / ".dockerignore").is_file() else None
    for source in words[:-1]:
        if is_secret_name(Path(source).name):
            return source
        place = folder / source
        if not place.is_dir():
            continue
        for file in sorted(place.rglob("*")):
            name = file.relative_to(folder).as_posix()
            goes = ".venv" not in file.parts and (ignored is None or not ignored.match_file(name))
            if goes and is_secret_name(file.name) and file.is_file():
                return name
    return None
