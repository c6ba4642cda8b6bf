"""What of a folder is for others: what its ignore files leave out, and what never leaves a machine."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

IGNORE_FILES: Final = (".dockerignore", ".gitignore")

_CACHES: Final = (
    ".git",
    ".hg",
    ".svn",
    ".venv",
    "venv",
    "__pycache__",
    "*.py[co]",
    ".*_cache",
    ".cache",
    ".hypothesis",
    ".tox",
    ".nox",
    "node_modules",
    "*.egg-info",
    ".DS_Store",
    ".idea",
    ".vscode",
)
_CACHES_AT_THE_TOP: Final = ("build", "dist", "outputs")
_SECRET_FOLDERS: Final = (".ssh", ".aws", ".docker", ".huggingface")
_SECRET_FILES: Final = (
    ".env",
    ".env.*",
    "*.env",
    ".envrc",
    ".netrc",
    ".pypirc",
    ".npmrc",
    ".git-credentials",
    "*.pem",
    "*.key",
    "*.p12",
    "*.pfx",
    "id_rsa*",
    "id_ed25519*",
    "id_ecdsa*",
    "credentials",
    "credentials.*",
    "token",
    "tokens",
    "*.token",
    "*.tokens",
    "token.txt",
    "tokens.txt",
    "*_token",
    "*_token.txt",
)
_SECRETS: Final = (
    re.compile(rb"\bhf_[A-Za-z0-9]{30,}\b"),
    re.compile(rb"\bgh[pousr]_[A-Za-z0-9]{30,}\b"),
    re.compile(rb"\bgithub_pat_\w{40,}\b"),
    re.compile(rb"\bsk-[A-Za-z0-9_-]{32,}"),
    re.compile(rb"\bAKIA[0-9A-Z]{16}\b"),
    re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----"),
)
_SEARCHED_BYTES: Final = 4_000_000
"""Longer files are data, in which nobody writes a token by hand."""


@dataclass(frozen=True, slots=True)
class Found:
    """One file or folder.

    Attributes:
        path: Relative to the folder, with slashes.
        reason: Why it is left out; None: it goes.
    """

    path: str
    reason: str | None = None


def walk(folder: Path) -> Iterator[Found]:
    """Yield every file that goes, and the files and folders that stay, in order.

    What either ignore file leaves out stays, whatever the other takes back with `!`.
    """
    rules = [_Rules(folder / name) for name in IGNORE_FILES if (folder / name).is_file()]
    yield from _walk(folder, "", rules)


def secret_in(path: Path) -> bool:
    """Whether a file holds what looks like a token or a private key."""
    if path.stat().st_size > _SEARCHED_BYTES:
        return False
    data = path.read_bytes()
    return any(pattern.search(data) for pattern in _SECRETS)


def _walk(folder: Path, beneath: str, rules: list["_Rules"]) -> Iterator[Found]:
    for path in sorted((folder / beneath).iterdir()):
        relative = f"{beneath}/{path.name}" if beneath else path.name
        reason = _reason(path, relative, rules)
        if path.is_dir() and not path.is_symlink():
            # A .dockerignore may take back a part of a folder that it leaves out.
            looked_into = reason is None or reason == ".dockerignore"
            inside = list(_walk(folder, relative, rules)) if looked_into else []
            if reason is None or any(found.reason is None for found in inside):
                yield from inside
            else:
                yield Found(f"{relative}/", reason)
        else:
            yield Found(relative, reason)


def _reason(path: Path, relative: str, rules: list["_Rules"]) -> str | None:
    secrets = _SECRET_FOLDERS if path.is_dir() else _SECRET_FILES
    if any(fnmatchcase(path.name.lower(), pattern) for pattern in secrets):
        return "may hold a secret"
    if relative in _CACHES_AT_THE_TOP or any(fnmatchcase(path.name, pattern) for pattern in _CACHES):
        return "made by a tool"
    if path.is_symlink():
        return "a link"
    if not path.is_dir() and not path.is_file():
        return "not a file"
    return next((one.name for one in rules if one.leaves_out(relative, path.is_dir())), None)


class _Rules:
    """The patterns of one ignore file; the last that fits decides."""

    def __init__(self, file: Path) -> None:
        self.name = file.name
        self._rules: list[tuple[re.Pattern[str], bool, bool]] = []
        anchored = self._docker = (
            file.name == ".dockerignore"
        )  # a name alone fits at any depth in a .gitignore
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            text = line.strip()
            if not text or text.startswith("#"):
                continue
            back = text.startswith("!")
            text = text.removeprefix("!").strip()
            only_folders = text.endswith("/") and not anchored
            text = text.rstrip("/")
            deep = not anchored and "/" not in text
            text = text.removeprefix("./").lstrip("/")
            if text and text != ".":
                self._rules.append((_pattern(f"**/{text}" if deep else text), back, only_folders))

    def leaves_out(self, relative: str, is_folder: bool) -> bool:
        """Whether a file or folder stays out."""
        out = False
        parts = relative.split("/")
        for pattern, back, only_folders in self._rules:
            # What fits a folder fits all that is in it.
            for count in range(1, len(parts) + 1):
                whole = count == len(parts)
                if only_folders and whole and not is_folder:
                    continue
                if pattern.fullmatch("/".join(parts[:count])):
                    out = not back
                    break
        return out


def _pattern(text: str) -> re.Pattern[str]:
    found, at = "", 0
    while at < len(text):
        if text.startswith("**/", at):
            found, at = f"{found}(?:.*/)?", at + 3
        elif text.startswith("**", at):
            found, at = f"{found}.*", at + 2
        elif text[at] == "*":
            found, at = f"{found}[^/]*", at + 1
        elif text[at] == "?":
            found, at = f"{found}[^/]", at + 1
        elif text[at] == "[" and (end := text.find("]", at + 2)) > 0:
            inside = text[at + 1 : end]
            negated = inside[0] in "!^"
            found += f"[{'^' if negated else ''}{re.escape(inside[negated:]).replace(re.escape('-'), '-')}]"
            at = end + 1
        else:
            at += text[at] == "\\" and at + 1 < len(text)
            found, at = found + re.escape(text[at]), at + 1
    return re.compile(found)
