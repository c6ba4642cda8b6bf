"""The name of a new environment, in each of its spellings."""

import keyword
import re
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from openenv_core.errors import ConfigurationError
from openenv_core.packages import ENVS, own_folder

SUFFIX: Final = "_env"
LONGEST: Final = 50

RESERVED: Final = {
    "base": "`ropewalk build base` makes the base image",
    "call_tool": "its action would be called as the core's own, CallToolAction",
    "list_tools": "its action would be called as the core's own, ListToolsAction",
    "openenv": "it is the name of the released package",
    "ropewalk": "it is the name of this one",
    "place_holder": "templates are called that",
}
"""Names that cannot be used, and why."""

_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


@dataclass(frozen=True, slots=True)
class EnvironmentNames:
    """The spellings of one name.

    Attributes:
        short: `rock_paper`; the name that environments are served by.
    """

    short: str

    @property
    def package(self) -> str:
        """`rock_paper_env`: the package, and its folder."""
        return self.short + SUFFIX

    @property
    def image(self) -> str:
        """`rock-paper-env`: the image; the distribution has the prefix `openenv-`."""
        return self.package.replace("_", "-")

    @property
    def prefix(self) -> str:
        """`RockPaper`: the prefix of classes."""
        return "".join(word.capitalize() for word in self.short.split("_"))

    @property
    def title(self) -> str:
        """`Rock Paper`: in prose."""
        return " ".join(word.capitalize() for word in self.short.split("_"))


PLACE_HOLDER: Final = EnvironmentNames("place_holder")
"""The name in the templates."""


def names_of(text: str, *, package: bool = True) -> EnvironmentNames:
    """Return the spellings of a name; `dice`, `dice_env` and `dice-env` are the same name.

    Args:
        text: The name.
        package: Whether a package of that name is to be made; otherwise a module.

    Raises:
        ConfigurationError: The name is not allowed.
    """
    short = text.replace("-", "_").removesuffix(SUFFIX)
    if not _NAME.fullmatch(short) or len(short) > LONGEST:
        raise _refusal(
            text, f"a name of lower-case letters, digits and single underscores, at most {LONGEST}"
        )
    if short == "env":
        raise _refusal(text, "a name before the suffix _env")
    if keyword.iskeyword(short) or keyword.issoftkeyword(short):
        raise _refusal(text, "a name that is no keyword of Python")
    if (reason := RESERVED.get(short)) is not None:
        raise _refusal(text, f"a name that is free ({reason})")
    names = EnvironmentNames(short)
    # `ropewalk serve NAME` looks up both.
    bundled = f"{ENVS}.{names.package}"
    packages = ((names.package, _find_installed(names.package)), (bundled, own_folder(bundled)))
    for module, where in packages if package else ((names.short, _find_installed(names.short)),):
        if where is not None:
            raise _refusal(text, f"a name that is free (there is a package {module} at {where})")
    return names


def _find_installed(module: str) -> str | None:
    """Return where an installed module is that would conflict with a new package; the working directory is ignored."""
    if module in sys.stdlib_module_names:
        return "Python's own library"
    try:
        spec = find_spec(module)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    where = spec.origin or next(iter(spec.submodule_search_locations or ()), None)
    if where is None:
        return "this interpreter"
    cwd = Path.cwd().resolve()
    # A folder of this name in the working directory is not installed; if it is in the way, `make` reports it.
    return None if cwd in Path(where).resolve().parents else where


def _refusal(text: str, expected: str) -> ConfigurationError:
    near = re.sub(r"[^a-z0-9]+", "_", _HUMP.sub("_", text).lower()).strip("_").removesuffix(SUFFIX)
    near = near[:LONGEST] if near[:1].isalpha() else f"game_{near}"[:LONGEST]
    other = near if near != text.replace("-", "_").removesuffix(SUFFIX) and _NAME.fullmatch(near) else ""
    hint = f"try {other!r}" if other and other not in RESERVED else "choose another"
    return ConfigurationError(f"expected {expected}, got {text!r}; {hint}")
