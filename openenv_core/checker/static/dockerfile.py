"""The Dockerfile of a folder, as it is written; what comes of it is looked at in an image."""

import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

from openenv_core.checker.check import CheckFailed, Level, NotApplicable, check
from openenv_core.checker.static.instructions import PLACES, Dockerfile
from openenv_core.checker.subject import Subject

OUR_PORT: Final = 8000
"""What our base image exposes."""

_SECRET_NAME: Final = re.compile(
    r"(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|PRIVATE_?KEY|CREDENTIAL)", re.IGNORECASE
)
_SECRET_VALUE: Final = re.compile(
    r"(hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|AKIA[A-Z0-9]{16})"
)
_SECRET_FILES: Final = (
    ".env",
    ".env.*",
    "*.pem",
    "*.key",
    "id_rsa",
    "id_ed25519",
    ".netrc",
    ".pypirc",
    ".npmrc",
)
_HARMLESS: Final = (".env.example", ".env.sample", ".env.template")
_PORT: Final = re.compile(r"--port[ =\"',]+(?P<port>\d+)")


@check(Level.STATIC)
def check_dockerfile_present(subject: Subject) -> None:
    """The folder has a Dockerfile."""
    folder = subject.need_folder()
    if Dockerfile.find(folder, _named(subject)) is None:
        raise CheckFailed(
            f"expected a Dockerfile in {folder}, got none at {' or '.join(PLACES)}",
            change="add server/Dockerfile as `ropewalk init` writes it",
        )


@check(Level.STATIC)
def check_dockerfile_base(subject: Subject) -> str:
    """The base image can be chosen: ARG BASE_IMAGE, and a FROM that uses it."""
    file = _dockerfile(subject)
    if "BASE_IMAGE" not in file.arguments or "BASE_IMAGE" not in file.base_variables:
        raise CheckFailed(
            f"expected {_short(file)} to build on ARG BASE_IMAGE, got FROM {file.base or 'nothing'}",
            change="begin with `ARG BASE_IMAGE=ropewalk-base:latest` and `FROM ${BASE_IMAGE}`, so that whoever builds "
            "can pin it or build on their own",
        )
    return file.base_image


@check(Level.STATIC)
def check_dockerfile_user(subject: Subject) -> str:
    """The container runs as another user than root."""
    file = _dockerfile(subject)
    user = file.last("USER")
    if user is None and file.on_our_base:
        return "the base's own"
    name = file.resolved(user.rest).partition(":")[0] if user is not None else ""
    if name in ("", "0", "root"):
        whose = ", as the released `openenv init` writes it," if file.on_released_base else ""
        raise CheckFailed(
            f"expected {_short(file)}{whose} to end as another user than root, "
            f"got {f'USER {name}' if name else 'no USER'}",
            change="end with `USER env` on our base; elsewhere with a user of a number that you make: "
            "`RUN useradd --uid 10001 env` and `USER env`",
        )
    return name


@check(Level.STATIC)
def check_dockerfile_health(subject: Subject) -> None:
    """The image tells whether its server is healthy."""
    file = _dockerfile(subject)
    found = file.last("HEALTHCHECK")
    if found is None and file.on_our_base:
        return
    if found is None or found.rest.upper() == "NONE":
        raise CheckFailed(
            f"expected a HEALTHCHECK in {_short(file)}, got {'HEALTHCHECK NONE' if found else 'none'}",
            change='add `HEALTHCHECK CMD ["healthcheck"]` on our base; elsewhere ask GET /health with Python',
        )


@check(Level.STATIC)
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
        raise CheckFailed(
            f"expected {_short(file)} to serve port {port} of the manifest, got port {', '.join(sorted(served))}",
            change="let `port:` in openenv.yaml and the server's --port say the same",
        )
    if str(port) not in exposed:
        raise CheckFailed(
            f"expected {_short(file)} to expose port {port} of the manifest, got "
            f"{f'port {chr(44).join(sorted(exposed))}' if exposed else 'no EXPOSE'}",
            change=f"add `EXPOSE {port}`",
        )
    return str(port)


@check(Level.STATIC)
def check_dockerfile_sources(subject: Subject) -> None:
    """What goes into the image is in the folder: nothing is added from a URL."""
    file = _dockerfile(subject)
    for one in file.all:
        if one.word == "ADD" and re.search(r"(https?|ftp|git)(://|@)", file.resolved(one.rest)):
            raise CheckFailed(
                f"expected no ADD of a URL, got line {one.line} of {_short(file)}: ADD {one.rest}",
                change="fetch it in a RUN that checks its digest, or put it into the folder and COPY it",
            )


@check(Level.STATIC)
def check_dockerfile_secrets(subject: Subject) -> None:
    """No secret goes into the image."""
    file, folder = _dockerfile(subject), subject.need_folder()
    for one in [*file.all]:
        if one.word in ("ENV", "ARG"):
            name, _, value = (part.strip() for part in one.rest.replace(" ", "=", 1).partition("="))
            bare = value.strip("'\"")
            if (bare and _SECRET_NAME.search(name) and not bare.startswith("$")) or _SECRET_VALUE.search(
                one.rest
            ):
                raise CheckFailed(
                    f"expected no secret in {_short(file)}, got {one.word} {name} with a value on line {one.line}",
                    change="take it out, revoke it if it was real, and give it to the container when it starts",
                )
        elif one.word == "RUN" and _SECRET_VALUE.search(one.rest):
            raise CheckFailed(
                f"expected no secret in {_short(file)}, got one on line {one.line}",
                change="take it out, revoke it, and use `RUN --mount=type=secret`",
            )
        elif one.word in ("COPY", "ADD") and (found := _secret_among(one.rest, folder)):
            raise CheckFailed(
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
        raise NotApplicable("there is no Dockerfile")
    return found


def _short(file: Dockerfile) -> str:
    return file.path.name if file.path.parent.name != "server" else f"server/{file.path.name}"


def _secret_among(rest: str, folder: Path) -> str | None:
    """Return a file of the folder that a COPY takes along and that looks like a secret."""
    words = [word for word in rest.split() if not word.startswith("--")]
    if len(words) < 2 or rest.startswith(("--from", "<<")):
        return None
    ignored = _ignored(folder)
    for source in words[:-1]:
        for pattern in _SECRET_FILES:
            if fnmatch(Path(source).name, pattern) and Path(source).name not in _HARMLESS:
                return source
        place = folder / source
        if not place.is_dir():
            continue
        for pattern in _SECRET_FILES:
            for file in sorted(place.rglob(pattern)):
                name = file.relative_to(folder).as_posix()
                if (
                    file.name not in _HARMLESS
                    and not _is_ignored(name, ignored)
                    and ".venv" not in file.parts
                ):
                    return name
    return None


def _ignored(folder: Path) -> list[str]:
    file = folder / ".dockerignore"
    if not file.is_file():
        return []
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def _is_ignored(name: str, ignored: list[str]) -> bool:
    found = False
    for line in ignored:
        pattern = line.removeprefix("!").strip("/").removeprefix("**/")
        if fnmatch(name, pattern) or fnmatch(Path(name).name, pattern) or name.startswith(f"{pattern}/"):
            found = not line.startswith("!")
    return found
