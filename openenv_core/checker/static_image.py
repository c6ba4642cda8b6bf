"""The Dockerfile of a folder, and what its image says of itself."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final, Self

from openenv_core.checker.check import CheckError, CheckLevel, NotApplicableError, check
from openenv_core.checker.subject import Subject
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


PLACES: Final = ("server/Dockerfile", "Dockerfile")
"""Where a folder has its Dockerfile."""

OUR_BASE: Final = "ropewalk-base"
"""What the base image is called; the one that serves has a user, a health check and a port."""

OUR_BASE_BUILDS: Final = "-build"
"""How the tag of the one that builds ends: root, and nothing to serve."""

RELEASED_BASE: Final = "openenv-base"
"""What the base image of folders made by the released `openenv init` is called."""

_HEREDOC: Final = re.compile(r"<<-?\s*['\"]?(?P<end>\w+)['\"]?")
_VARIABLE: Final = re.compile(r"\$(?:\{(?P<braced>\w+)(?::?[-+](?P<default>[^}]*))?\}|(?P<plain>\w+))")


@dataclass(frozen=True, slots=True)
class ParsedInstruction:
    """One instruction.

    Attributes:
        word: In capitals.
        rest: What follows it, on one line.
        line: Where it begins.
    """

    word: str
    rest: str
    line: int


@dataclass(slots=True)
class Stage:
    """What follows one FROM.

    Attributes:
        base: The image or the earlier stage that it begins from, as it is written.
        name: What later stages call it.
        instructions: Those after the FROM.
    """

    base: str
    name: str | None
    instructions: list[ParsedInstruction] = field(default_factory=list)


@dataclass(slots=True)
class ParsedDockerfile:
    """All of one.

    Attributes:
        path: Where it is.
        arguments: The global ARGs and their defaults.
        stages: In their order.
    """

    path: Path
    arguments: dict[str, str] = field(default_factory=dict)
    stages: list[Stage] = field(default_factory=list)

    @classmethod
    def find(cls, folder: Path, named: str | None = None) -> Self | None:
        """Read the Dockerfile of an environment's folder; None where there is none."""
        for place in (*([named] if named else []), *PLACES):
            if (folder / place).is_file():
                return cls.read(folder / place)
        return None

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read one."""
        found = cls(path)
        for one in _instructions(path.read_text(encoding="utf-8", errors="replace")):
            if one.word == "FROM":
                words = [word for word in one.rest.split() if not word.startswith("--")]
                named = len(words) == 3 and words[1].lower() == "as"
                found.stages.append(Stage(words[0] if words else "", words[2] if named else None))
            elif found.stages:
                found.stages[-1].instructions.append(one)
            elif one.word == "ARG":
                name, _, default = one.rest.partition("=")
                found.arguments[name.strip()] = default.strip().strip("'\"")
        return found

    @property
    def all(self) -> list[ParsedInstruction]:
        """Every instruction of every stage."""
        return [one for stage in self.stages for one in stage.instructions]

    @property
    def final(self) -> list[ParsedInstruction]:
        """The instructions that the last stage's image has, those of the stages that it begins from included."""
        return [one for stage in self._line() for one in stage.instructions]

    @property
    def base(self) -> str:
        """The image that the last stage begins from, with variables in it."""
        line = self._line()
        return line[0].base if line else ""

    @property
    def base_image(self) -> str:
        """The same, with the variables' defaults in their places."""
        return self.resolved(self.base)

    @property
    def base_variables(self) -> set[str]:
        """The variables in the name of the base."""
        return {match["braced"] or match["plain"] for match in _VARIABLE.finditer(self.base)}

    @property
    def on_our_base(self) -> bool:
        """Whether the base is ours, of the sort that serves: user, health check and port come with it."""
        name = self.base_image.rpartition("/")[2]
        return name.partition(":")[0] == OUR_BASE and not name.endswith(OUR_BASE_BUILDS)

    @property
    def on_released_base(self) -> bool:
        """Whether the folder was made for the released package's base image."""
        return RELEASED_BASE in self.base_image

    def last(self, word: str) -> ParsedInstruction | None:
        """Return the last of these instructions that the image has."""
        return next((one for one in reversed(self.final) if one.word == word), None)

    def resolved(self, text: str) -> str:
        """Put defaults in the place of variables; one without a default stays."""
        known = dict(self.arguments)
        for one in self.all:
            if one.word in ("ARG", "ENV") and "=" in one.rest:
                name, _, value = one.rest.partition("=")
                known.setdefault(name.strip(), value.strip().strip("'\""))

        def meant(match: re.Match[str]) -> str:
            return known.get(match["braced"] or match["plain"]) or match["default"] or match[0]

        return _VARIABLE.sub(meant, text)

    def _line(self) -> list[Stage]:
        """Return the last stage after those that it begins from."""
        found: list[Stage] = []
        wanted: Stage | None = self.stages[-1] if self.stages else None
        while wanted is not None:
            found.insert(0, wanted)
            before = self.stages[: self.stages.index(wanted)]
            base = self.resolved(wanted.base)
            wanted = next((stage for stage in before if stage.name and stage.name == base), None)
        return found


def _instructions(text: str) -> Iterator[ParsedInstruction]:
    lines = enumerate(text.splitlines(), 1)
    for number, line in lines:
        whole = _uncommented(line)
        while whole.endswith("\\"):
            _, following = next(lines, (0, ""))
            whole = f"{whole[:-1].rstrip()} {_uncommented(following)}".strip()
        word, _, rest = whole.partition(" ")
        if not word:
            continue
        yield ParsedInstruction(word.upper(), rest.strip(), number)
        if word.upper() in ("RUN", "COPY", "ADD"):
            for match in _HEREDOC.finditer(rest):
                while next(lines, (0, match["end"]))[1].strip() != match["end"]:
                    pass


def _uncommented(line: str) -> str:
    """Return a line without the space around it; nothing for a comment, which may stand among continuations."""
    found = line.strip()
    return "" if found.startswith("#") else found


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


@check(CheckLevel.STATIC)
def check_dockerfile_present(subject: Subject) -> None:
    """The folder has a Dockerfile."""
    folder = subject.need_folder()
    if ParsedDockerfile.find(folder, _named(subject)) is None:
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
            if (bare and _SECRET_NAME.search(name) and not bare.startswith("$")) or _SECRET_VALUE.search(
                one.rest
            ):
                raise CheckError(
                    f"expected no secret in {_short(file)}, got {one.word} {name} with a value on line {one.line}",
                    change="take it out, revoke it if it was real, and give it to the container when it starts",
                )
        elif one.word == "RUN" and _SECRET_VALUE.search(one.rest):
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


def _dockerfile(subject: Subject) -> ParsedDockerfile:
    found = ParsedDockerfile.find(subject.need_folder(), _named(subject))
    if found is None:
        raise NotApplicableError("there is no Dockerfile")
    return found


def _short(file: ParsedDockerfile) -> str:
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
