"""An environment in one Python file: its classes, its dependencies, and how it is imported.

The file's classes are found without running it; `ropewalk serve dice.py` and the other commands then use the one.
"""

import ast
import importlib
import os
import re
import symtable
import sys
import tokenize
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from openenv_core.errors import ConfigurationError
from openenv_core.manifest import Manifest, parse_manifest

_BASE: Final = "Environment"
"""A class of the file is an environment if it derives from a class whose name ends so."""

_HEADER: Final = re.compile(r"(?m)^# /// script\s*$\s(?P<content>(^#(| .*)$\s)+)^# ///$")
"""The block of PEP 723 that declares a file's dependencies; the expression is that of the PEP."""

_OURS: Final = re.compile(r"ropewalk\s*($|[\[<>=!~;@ ])", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class EnvironmentFile:
    """What a Python file holds.

    Attributes:
        classes: Names of the environments in it, public ones in their order.
        has_app: Whether it makes an application itself, as `app`.
    """

    classes: tuple[str, ...]
    has_app: bool


def name_class(text: str) -> str:
    """Return a target with the class in it if it is a Python file with environments: `FILE.py:CLASS`.

    A file with an application `app`, one without environments, and a target that is no file or has an attribute, are
    returned as they are. If there are several classes, the user is asked, on a terminal.

    Raises:
        ConfigurationError: There are several environments in the file, and no terminal.
    """
    path = Path(os.path.expanduser(text))
    if path.suffix != ".py" or not path.is_file():
        return text
    file = read_file(path)
    if file.has_app or not file.classes:
        return text
    return f"{text}:{file.classes[0] if len(file.classes) == 1 else _choose(text, file.classes)}"


def _choose(text: str, classes: Sequence[str]) -> str:
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise ConfigurationError(
            f"there are {len(classes)} environments in {text}; name one: "
            + " or ".join(f"{text}:{name}" for name in classes)
        )
    while True:
        sys.stderr.write(f"Which environment of {text}? {', '.join(classes)}: ")
        sys.stderr.flush()
        if not (line := sys.stdin.readline()):
            raise ConfigurationError(f"no environment of {text} was chosen; name one: {text}:{classes[0]}")
        if (answer := line.strip()) in classes:
            return answer


def read_file(path: Path) -> EnvironmentFile:
    """Find the environments in a file, without running it; none in a file that is not Python, whose import says so."""
    try:
        with tokenize.open(path) as file:
            text = file.read()
        tree, names = ast.parse(text, str(path)), symtable.symtable(text, str(path), "exec")
    except (OSError, SyntaxError, ValueError):
        return EnvironmentFile((), has_app=False)
    found: list[str] = []
    parents: set[str] = set()  # a class that another of the file derives from is its base, not another game
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            bases = {_last_name(base) for base in node.bases}
            parents |= bases
            if any(base.endswith(_BASE) or base in found for base in bases):
                found.append(node.name)
    has_app = "app" in names.get_identifiers() and names.lookup("app").is_local()
    public = [name for name in found if not name.startswith("_")]
    leaves = [name for name in public if name not in parents]
    return EnvironmentFile(tuple(leaves or public), has_app)


def _last_name(base: ast.expr) -> str:
    """Return the last part of a base's name, without its type arguments."""
    if isinstance(base, ast.Subscript):
        base = base.value
    return base.attr if isinstance(base, ast.Attribute) else base.id if isinstance(base, ast.Name) else ""


def import_file(path: Path) -> ModuleType:
    """Import a file under its own name, with its folder importable; the same module at every call.

    Raises:
        ConfigurationError: Its name cannot be imported, or belongs to another module.
        Exception: Raised by the file's own code.
    """
    path = path.resolve()
    if not path.stem.isidentifier():
        raise ConfigurationError(f"the name of {path.name} cannot be imported; rename it, as in my_game.py")
    if _is_from(main := sys.modules["__main__"], path):
        return main
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    module = importlib.import_module(path.stem)
    if not _is_from(module, path):
        raise ConfigurationError(f"{path.name} has the name of another module, {path.stem}; rename the file")
    return module


def _is_from(module: ModuleType, path: Path) -> bool:
    place = getattr(module, "__file__", None)
    return place is not None and Path(place).resolve() == path


@dataclass(frozen=True, slots=True)
class FileHeader:
    """The `# /// script` block of a file (PEP 723).

    Attributes:
        dependencies: Requirements, without Ropewalk itself.
        declarations: The table `tool.ropewalk`: keys of openenv.yaml.
    """

    dependencies: tuple[str, ...] = ()
    declarations: dict[str, Any] = field(default_factory=dict)


def read_header(path: Path) -> FileHeader:
    """Return what a file declares in its `# /// script` block, which may be missing.

    Raises:
        ConfigurationError: The block is not valid, or there are several.
    """
    blocks = list(_HEADER.finditer(path.read_text(encoding="utf-8")))
    if not blocks:
        return FileHeader()
    if len(blocks) > 1:
        raise ConfigurationError(f"{path} has {len(blocks)} blocks `# /// script`; leave one")
    lines = blocks[0]["content"].splitlines()
    try:
        content = tomllib.loads("\n".join(line[2:] if line.startswith("# ") else line[1:] for line in lines))
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"the block `# /// script` of {path} is not TOML: {error}") from None
    dependencies, tool = content.get("dependencies", []), content.get("tool", {})
    if not isinstance(dependencies, list) or not all(isinstance(each, str) for each in dependencies):
        raise ConfigurationError(f"`dependencies` of {path} is not a list of texts")
    declarations = tool.get("ropewalk", {}) if isinstance(tool, dict) else {}
    if not isinstance(declarations, dict):
        raise ConfigurationError(f"`tool.ropewalk` of {path} is not a table")
    return FileHeader(tuple(each for each in dependencies if not _OURS.match(each)), declarations)


def read_file_manifest(path: Path, name: str) -> Manifest:
    """Return the manifest that a file stands for, with what its header declares.

    Args:
        path: The file.
        name: The environment's class.

    Raises:
        ManifestError: A declaration is invalid.
    """
    keys = {"spec_version": 1, "name": path.stem, "app": f"{path.stem}:{name}"}
    return parse_manifest({**keys, **read_header(path).declarations})
