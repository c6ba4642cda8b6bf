"""Serves this machine's local package folders to pip in a container, which cannot see them."""

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

from local_http import running

PORT = 26690
"""Constant, since build arguments determine which cached layers can be reused."""
OPTIONS = {
    "index-url": "PIP_INDEX_URL",
    "extra-index-url": "PIP_EXTRA_INDEX_URL",
    "find-links": "PIP_FIND_LINKS",
}


def settings_of_pip() -> dict[str, list[str]]:
    """Return the package sources that this machine's pip is configured with, by option."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "--no-input", "config", "list"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    found: dict[str, list[str]] = {}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        option = key.rpartition(".")[2]
        if option in OPTIONS:
            known = found.setdefault(option, [])
            known += [place for place in value.strip("'\"").replace("\\n", " ").split() if place not in known]
    return found


def folder_of(place: str) -> Path | None:
    """Return the folder of a source, None if it is a URL."""
    parts = urlsplit(place)
    if parts.scheme == "file":
        return Path(unquote(parts.path))
    return Path(place) if place.startswith("/") else None


@contextmanager
def served_to_containers(address: str, settings: Mapping[str, Sequence[str]]) -> Iterator[dict[str, str]]:
    """Serve local folders, so that pip in a container can use the same sources as this machine's pip.

    Args:
        address: This machine's address, as seen by containers.
        settings: Sources by option, from `settings_of_pip`.

    Yields:
        Build arguments by name, valid within the block.
    """
    # An index links to files next to its folder.
    roots = {
        (option, place): folder if option == "find-links" else folder.parent
        for option, places in settings.items()
        for place in places
        if (folder := folder_of(place))
    }
    if not roots:
        yield {OPTIONS[option]: " ".join(places) for option, places in settings.items()}
        return
    numbers = {key: str(number) for number, key in enumerate(sorted(roots))}
    server = ThreadingHTTPServer(
        (address, PORT), partial(_Handler, {numbers[key]: root for key, root in roots.items()})
    )

    def told(option: str, place: str) -> str:
        folder, root = folder_of(place), roots.get((option, place))
        if folder is None or root is None:
            return place
        path = "" if folder == root else f"{folder.name}/"
        return f"http://{address}:{PORT}/{numbers[option, place]}/{path}"

    variables = {
        OPTIONS[option]: " ".join(told(option, place) for place in places)
        for option, places in settings.items()
    }
    with running(server):
        yield {**variables, "PIP_TRUSTED_HOST": address}


class _Handler(SimpleHTTPRequestHandler):
    """Serves the folder of a number at /NUMBER/."""

    def __init__(self, roots: Mapping[str, Path], *words: object) -> None:
        self._roots = roots
        super().__init__(*words)  # type: ignore[arg-type]

    def translate_path(self, path: str) -> str:
        number, _, rest = urlsplit(path).path.lstrip("/").partition("/")
        self.directory = str(self._roots.get(number, "/nonexistent"))
        return super().translate_path("/" + rest)

    def log_message(self, *words: object) -> None:
        """Log nothing: a build requests hundreds of files."""
