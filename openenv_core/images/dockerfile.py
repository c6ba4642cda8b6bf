"""What a Dockerfile says, as far as building it has to know beforehand."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

from openenv_core.errors import ConfigurationError

PREDEFINED_ARGS: Final = frozenset(
    name
    for upper in ("HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "NO_PROXY", "ALL_PROXY")
    for name in (upper, upper.lower())
)
"""Build arguments that every Dockerfile takes without an ARG."""

BASE_ARG: Final = "BASE_IMAGE"

_DIRECTIVE = re.compile(r"#\s*(?P<name>\w+)\s*=\s*(?P<value>.+?)\s*$")
_HEREDOC = re.compile(r"(?:^|\s)\d*<<-?(?P<quote>['\"]?)(?P<word>[A-Za-z_]\w*)(?P=quote)(?=\s|$|[;|&)])")
_ARG = re.compile(r"(?P<name>[A-Za-z_]\w*)(?:=(?P<value>\"[^\"]*\"|'[^']*'|\S*))?")
_STAGE = re.compile(r"(?:--platform=\S+\s+)?(?P<image>\S+)(?:\s+AS\s+(?P<name>\S+))?\s*$", re.IGNORECASE)
_FLAG = re.compile(r"--(?P<name>[a-z-]+)(=\S*)?")

_BUILDKIT_FLAGS: Final = {
    "RUN": {"mount", "network", "security"},
    "COPY": {"chmod", "link", "parents", "exclude"},
    "ADD": {"chmod", "link", "checksum", "keep-git-dir", "exclude"},
}
"""Flags that the engine's older builder does not know."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction: its word in capitals, the rest with its continued lines joined, and where it begins."""

    word: str
    rest: str
    line: int
    heredoc: bool = False

    @property
    def flags(self) -> Iterator[str]:
        """The names of its flags, those between the word and what it works on."""
        for part in self.rest.split():
            if (found := _FLAG.fullmatch(part)) is None:
                return
            yield found["name"]


@dataclass(frozen=True)
class Dockerfile:
    """A Dockerfile, read but not understood any further than asked for here.

    Attributes:
        instructions: All of them, in order.
        directives: What its first comments tell the parser: `syntax`, `escape`, `check`.
    """

    instructions: tuple[Instruction, ...]
    directives: dict[str, str]

    @classmethod
    def read(cls, path: Path) -> "Dockerfile":
        """Read a file.

        Raises:
            ConfigurationError: It cannot be read, or holds no instruction.
        """
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"expected a readable Dockerfile at {path}, got: {error}") from error
        found = cls.parse(text)
        if not found.images:
            raise ConfigurationError(f"expected a FROM in {path}, got {len(found.instructions)} instructions")
        return found

    @classmethod
    def parse(cls, text: str) -> "Dockerfile":
        """Take a Dockerfile's text apart."""
        lines = text.removeprefix("\ufeff").splitlines()
        directives = _directives(lines)
        return cls(tuple(_instructions(lines, directives.get("escape", "\\"))), directives)

    @cached_property
    def args(self) -> dict[str, str | None]:
        """The build arguments that it takes, with the first default of each."""
        found: dict[str, str | None] = {}
        for one in self.instructions:
            if one.word == "ARG":
                for match in _ARG.finditer(one.rest):
                    value = match["value"]
                    found.setdefault(match["name"], value.strip("\"'") if value is not None else None)
        return found

    @cached_property
    def images(self) -> tuple[str, ...]:
        """What its stages stand on, as written; stages of its own are left out."""
        found, stages = [], set[str]()
        for one in self.instructions:
            if one.word == "FROM" and (match := _STAGE.match(one.rest)):
                if match["image"].lower() not in stages:
                    found.append(match["image"])
                if match["name"]:
                    stages.add(match["name"].lower())
        return tuple(found)

    @cached_property
    def for_buildkit(self) -> tuple[str, ...]:
        """What in it the engine's older builder cannot do, each with its line."""
        found = [f"# syntax={self.directives['syntax']}"] if "syntax" in self.directives else []
        for one in self.instructions:
            known = _BUILDKIT_FLAGS.get(one.word, set())
            found += [f"{one.word} --{flag} (line {one.line})" for flag in one.flags if flag in known]
            if one.heredoc:
                found.append(f"a heredoc (line {one.line})")
        return tuple(found)

    @property
    def base(self) -> str | None:
        """The default of ARG BASE_IMAGE, where a stage stands on it."""
        used = any(BASE_ARG in image for image in self.images)
        return (self.args.get(BASE_ARG) or "") if used and BASE_ARG in self.args else None


def _directives(lines: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in lines:
        match = _DIRECTIVE.match(line.strip())
        if match is None or match["name"].lower() not in ("syntax", "escape", "check"):
            break
        found[match["name"].lower()] = match["value"]
    return found


def _instructions(lines: list[str], escape: str) -> Iterator[Instruction]:
    rest = iter(enumerate(lines, start=1))
    for number, line in rest:
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        while text.endswith(escape):
            text = text[: -len(escape)].rstrip()
            for _, more in rest:
                # Comments and empty lines between continued lines do not end them.
                if (more := more.strip()) and not more.startswith("#"):
                    text = f"{text} {more}"
                    break
            else:
                break
        word, _, after = text.partition(" ")
        word = word.upper()
        # A shift or a here-string of a shell is no heredoc of the Dockerfile, nor is one in another instruction.
        bodies = (
            [match["word"] for match in _HEREDOC.finditer(after)] if word in ("RUN", "COPY", "ADD") else []
        )
        for body in bodies:
            for _, more in rest:
                if more.strip() == body:
                    break
        yield Instruction(word, after.strip(), number, bool(bodies))
