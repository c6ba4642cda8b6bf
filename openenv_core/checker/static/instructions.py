"""A Dockerfile, read as far as checks look at it: stages, and what the last of them ends with."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

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
class Instruction:
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
    instructions: list[Instruction] = field(default_factory=list)


@dataclass(slots=True)
class Dockerfile:
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
    def all(self) -> list[Instruction]:
        """Every instruction of every stage."""
        return [one for stage in self.stages for one in stage.instructions]

    @property
    def final(self) -> list[Instruction]:
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

    def last(self, word: str) -> Instruction | None:
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


def _instructions(text: str) -> Iterator[Instruction]:
    lines = enumerate(text.splitlines(), 1)
    for number, line in lines:
        whole = _uncommented(line)
        while whole.endswith("\\"):
            _, following = next(lines, (0, ""))
            whole = f"{whole[:-1].rstrip()} {_uncommented(following)}".strip()
        word, _, rest = whole.partition(" ")
        if not word:
            continue
        yield Instruction(word.upper(), rest.strip(), number)
        if word.upper() in ("RUN", "COPY", "ADD"):
            for match in _HEREDOC.finditer(rest):
                while next(lines, (0, match["end"]))[1].strip() != match["end"]:
                    pass


def _uncommented(line: str) -> str:
    """Return a line without the space around it; nothing for a comment, which may stand among continuations."""
    found = line.strip()
    return "" if found.startswith("#") else found
