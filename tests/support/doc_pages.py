"""The blocks of the documentation's pages, and what its examples print."""

import re
import sys
from pathlib import Path

from module_run import ROOT, finished


def page(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def blocks(text: str, *languages: str) -> list[str]:
    """Return the fenced blocks of a page's text in these languages."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    return [block for language, block in found if language in languages]


def commands(block: str) -> list[str]:
    """Return the commands of a block, continued lines joined, without comments."""
    return [line for line in block.replace("\\\n", " ").splitlines() if line and not line.startswith("#")]


def printed(code: str, timeout_s: float = 200, *, cwd: Path = ROOT) -> str:
    """Return what a program prints that runs from the repository's root, where a warning is an error."""
    done = finished(sys.executable, "-W", "error", "-c", code, cwd=cwd, timeout_s=timeout_s)
    assert done.returncode == 0, done.stderr
    return done.stdout
