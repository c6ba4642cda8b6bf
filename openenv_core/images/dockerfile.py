"""A parser of Dockerfiles, as far as builds need one."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

from openenv_core.errors import ConfigurationError

PLACES: Final = ("server/Dockerfile", "Dockerfile")
"""Paths of a folder's Dockerfile; the first that exists is used."""

BASE_ARG: Final = "BASE_IMAGE"
"""The ARG with the base image."""

OUR_BASE: Final = "ropewalk-base"
"""The name of our base image; the runtime variant has a user, a health check and a port."""

OUR_BASE_BUILDS: Final = (":build", "-build")
"""Ends of the tags of the build variant of our base: root, with build tools."""

RELEASED_BASE: Final = "openenv-base"
"""The name of the base image of folders made by the released `openenv init`."""

_DIRECTIVE: Final = re.compile(r"#\s*(?P<name>syntax|escape|check)\s*=\s*(?P<value>.+?)\s*$", re.IGNORECASE)
_HEREDOC: Final = re.compile(
    r"(?:^|\s)\d*<<-?(?P<quote>['\"]?)(?P<word>[A-Za-z_]\w*)(?P=quote)(?=\s|$|[;|&)])"
)
_ARG: Final = re.compile(r"(?P<name>[A-Za-z_]\w*)(?:=(?P<value>\"[^\"]*\"|'[^']*'|\S*))?")
_VARIABLE: Final = re.compile(r"\$(?:\{(?P<braced>\w+)(?::?[-+](?P<default>[^}]*))?\}|(?P<plain>\w+))")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction: its keyword and its arguments."""

    keyword: str
    arguments: str


@dataclass(slots=True)
class Stage:
    """A build stage: one FROM and its instructions."""

    base: str
    name: str | None
    instructions: list[Instruction] = field(default_factory=list)


@dataclass(slots=True)
class Dockerfile:
    """A parsed Dockerfile: the ARGs before the first FROM, and the stages."""

    path: Path
    arguments: dict[str, str | None] = field(default_factory=dict)
    stages: list[Stage] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a Dockerfile to be built; ConfigurationError if it cannot be read or has no FROM."""
        try:
            dockerfile = cls.parse(path.read_text(encoding="utf-8"), path)
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"expected a readable Dockerfile at {path}, got: {error}") from error
        if not dockerfile.stages:
            raise ConfigurationError(f"there is no FROM in {path}")
        return dockerfile

    @classmethod
    def parse(cls, text: str, path: Path = Path("Dockerfile")) -> Self:
        """Parse a Dockerfile's text."""
        dockerfile = cls(path)
        for instruction in _instructions(text):
            if instruction.keyword == "FROM":
                arguments = [
                    argument for argument in instruction.arguments.split() if not argument.startswith("--")
                ]
                has_name = len(arguments) == 3 and arguments[1].lower() == "as"
                dockerfile.stages.append(
                    Stage(arguments[0] if arguments else "", arguments[2] if has_name else None)
                )
            elif dockerfile.stages:
                dockerfile.stages[-1].instructions.append(instruction)
            elif instruction.keyword == "ARG":
                dockerfile.arguments |= values_in(instruction)
        return dockerfile

    @property
    def args(self) -> dict[str, str | None]:
        """The build arguments that it declares, each with its first default."""
        values = dict(self.arguments)
        for instruction in self.all:
            if instruction.keyword == "ARG":
                values |= {
                    name: value for name, value in values_in(instruction).items() if name not in values
                }
        return values

    @property
    def all(self) -> list[Instruction]:
        """Every instruction of every stage."""
        return [instruction for stage in self.stages for instruction in stage.instructions]

    @property
    def final(self) -> list[Instruction]:
        """The instructions of the last stage, preceded by those of the stages that it is based on."""
        return [instruction for stage in self._line() for instruction in stage.instructions]

    @property
    def base(self) -> str:
        """The image that the last stage is based on, with variables not substituted."""
        line = self._line()
        return line[0].base if line else ""

    @property
    def base_image(self) -> str:
        """`base` with variables replaced by their defaults."""
        return self.substitute(self.base)

    @property
    def takes_base(self) -> bool:
        """Whether a stage is based on its ARG BASE_IMAGE."""
        return BASE_ARG in self.args and any(BASE_ARG in variables_in(stage.base) for stage in self.stages)

    def find_last(self, keyword: str) -> Instruction | None:
        """Return the last instruction of the image with this keyword, if any."""
        return next(
            (instruction for instruction in reversed(self.final) if instruction.keyword == keyword), None
        )

    def substitute(self, text: str) -> str:
        """Replace variables by their defaults; one without a default stays."""
        known = dict(self.arguments)
        for instruction in self.all:
            if instruction.keyword in ("ARG", "ENV"):
                known = values_in(instruction) | known

        def default(match: re.Match[str]) -> str:
            return known.get(match["braced"] or match["plain"]) or match["default"] or match[0]

        return _VARIABLE.sub(default, text)

    def _line(self) -> list[Stage]:
        """Return the last stage, preceded by the stages that it is based on."""
        line: list[Stage] = []
        current: Stage | None = self.stages[-1] if self.stages else None
        while current is not None:
            line.insert(0, current)
            before = self.stages[: self.stages.index(current)]
            base = self.substitute(current.base).lower()
            current = next((stage for stage in before if (stage.name or "").lower() == base), None)
        return line


def variables_in(text: str) -> set[str]:
    """Return the names of the variables in a text."""
    return {match["braced"] or match["plain"] for match in _VARIABLE.finditer(text)}


def values_in(instruction: Instruction) -> dict[str, str | None]:
    """Return the names in an ARG or ENV, each with its first value."""
    name, _, rest = instruction.arguments.partition(" ")
    if instruction.keyword == "ENV" and "=" not in name:  # the older form, of one variable
        return {name: rest.strip()}
    defaults: dict[str, str | None] = {}
    for match in _ARG.finditer(instruction.arguments):
        value = match["value"]
        defaults.setdefault(match["name"], value.strip("\"'") if value is not None else None)
    return defaults


def _instructions(text: str) -> Iterator[Instruction]:
    lines = text.removeprefix("\ufeff").splitlines()
    escape = "\\"
    for line in lines:
        if (match := _DIRECTIVE.match(line.strip())) is None:
            break
        if match["name"].lower() == "escape":
            escape = match["value"]
    remaining = iter(lines)
    for line in remaining:
        joined = _strip_comment(line)
        while joined.endswith(escape):
            joined = joined.removesuffix(escape).rstrip()
            # Comments and empty lines do not end a continued line.
            following = next((more for each in remaining if (more := _strip_comment(each))), "")
            joined = f"{joined} {following}".rstrip()
        word, _, rest = joined.partition(" ")
        if not word:
            continue
        yield Instruction(word.upper(), rest.strip())
        if word.upper() in ("RUN", "COPY", "ADD"):
            for match in _HEREDOC.finditer(rest):
                while next(remaining, match["word"]).strip() != match["word"]:
                    pass


def _strip_comment(line: str) -> str:
    stripped = line.strip()
    return "" if stripped.startswith("#") else stripped
