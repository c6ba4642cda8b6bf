"""Which files of a folder may be published: applies its ignore files, and excludes secrets and caches."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from openenv_core.errors import installed_with

if TYPE_CHECKING:
    from pathspec import PathSpec

IGNORE_FILES: Final = (".dockerignore", ".gitignore")

_MAY_HOLD_SECRET: Final = "may hold a secret"
_SECRET: Final = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}\b|\bgh[pousr]_[A-Za-z0-9]{20,}\b|\bgithub_pat_\w{40,}\b|\bsk-[A-Za-z0-9_-]{20,}|"
    r"\bAKIA[0-9A-Z]{16}\b|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)
_SEARCHED_BYTES: Final = 4_000_000
"""Larger files are data, into which nobody writes a token by hand."""


@dataclass(frozen=True, slots=True)
class WalkEntry:
    """One file or folder of a walk.

    Attributes:
        path: Its path relative to the folder, with slashes.
        reason: Why it is left out; None if it is included.
    """

    path: str
    reason: str | None = None


def walk(folder: Path) -> Iterator[WalkEntry]:
    """Yield every included file, and every file and folder left out, in order.

    A path that either ignore file excludes is left out, even if the other includes it again with `!`.
    """
    rules = {name: read_rules(folder / name) for name in IGNORE_FILES if (folder / name).is_file()}
    yield from _walk(folder, "", rules)


def read_rules(file: Path) -> "PathSpec[Any]":
    """Read an ignore file; `match_file` of the result tells whether a path relative to its folder is left out."""
    with installed_with("author", f"the package pathspec, which reads {file.name}"):
        from pathspec import GitIgnoreSpec, PathSpec
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    if file.name.endswith(".gitignore"):
        return GitIgnoreSpec.from_lines(lines)
    # Docker's patterns are all relative to the folder, and ignore a trailing slash.
    patterns = []
    for line in lines:
        text = line.strip()
        if text and not text.startswith("#"):
            negated = text.startswith("!")
            path = text.removeprefix("!").strip().removeprefix("./").strip("/")
            if path not in ("", "."):
                # A pattern that matches a folder matches its contents too.
                patterns += [f"{'!' * negated}/{path}", f"{'!' * negated}/{path}/**"]
    return PathSpec.from_lines("gitignore", patterns)


def find_context_secrets(folder: Path) -> list[str]:
    """Return the files that may hold a secret in a build's context, which lacks what .dockerignore names."""
    file = folder / ".dockerignore"
    rules = {file.name: read_rules(file)} if file.is_file() else {}
    return [
        entry.path
        for entry in _walk(folder, "", rules)
        if (
            entry.reason == _MAY_HOLD_SECRET
            and not any(spec.match_file(entry.path) for spec in rules.values())
        )
        or (entry.reason is None and secret_in(folder / entry.path))
    ]


def secret_in(path: Path) -> bool:
    """Whether a file contains what looks like a token or a private key."""
    return path.stat().st_size <= _SEARCHED_BYTES and bool(
        _SECRET.search(path.read_bytes().decode("latin-1"))
    )


@cache
def _our_rules(name: str) -> "PathSpec[Any]":
    return read_rules(Path(__file__).with_name(name))


def _walk(folder: Path, subfolder: str, rules: "dict[str, PathSpec[Any]]") -> Iterator[WalkEntry]:
    for path in sorted((folder / subfolder).iterdir()):
        relative = f"{subfolder}/{path.name}" if subfolder else path.name
        reason = _reason(path, relative, rules)
        if path.is_dir() and not path.is_symlink():
            # A .dockerignore may include a part of a folder that it excludes.
            is_walked = reason is None or reason == ".dockerignore"
            children = list(_walk(folder, relative, rules)) if is_walked else []
            if reason is None or any(child_entry.reason is None for child_entry in children):
                yield from children
            else:
                yield WalkEntry(f"{relative}/", reason)
        else:
            yield WalkEntry(relative, reason)


def _reason(path: Path, relative: str, rules: "dict[str, PathSpec[Any]]") -> str | None:
    end = "/" if path.is_dir() else ""
    if _our_rules("secrets.gitignore").match_file(path.name.lower() + end):
        return _MAY_HOLD_SECRET
    if _our_rules("tools.gitignore").match_file(relative + end):
        return "made by a tool"
    if path.is_symlink():
        return "a link"
    if not path.is_dir() and not path.is_file():
        return "not a file"
    return next((name for name, spec in rules.items() if spec.match_file(relative + end)), None)
