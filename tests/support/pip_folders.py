"""Packages that pip knows as folders of this machine, for a container that cannot see those."""

import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

PORT = 26690
"""The same each time: what a build is told of it decides which layers of an earlier one still hold."""
OPTIONS = {
    "index-url": "PIP_INDEX_URL",
    "extra-index-url": "PIP_EXTRA_INDEX_URL",
    "find-links": "PIP_FIND_LINKS",
}


def settings_of_pip() -> dict[str, list[str]]:
    """The places that this machine's pip is told to look at, by option."""
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
    """The folder that a place is, or None where it is an address."""
    parts = urlsplit(place)
    if parts.scheme == "file":
        return Path(unquote(parts.path))
    return Path(place) if place.startswith("/") else None


@contextmanager
def served_to_containers(address: str, settings: Mapping[str, Sequence[str]]) -> Iterator[dict[str, str]]:
    """The variables that make pip in a container look where this machine's pip does.

    Args:
        address: Of this machine, as containers see it.
        settings: Places by option, as `settings_of_pip` finds them.

    Yields:
        Build arguments by name; folders are served while the context lasts.
    """
    # The files of an index lie beside its own folder, and its links lead there.
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
    thread = threading.Thread(target=server.serve_forever, name="packages", daemon=True)
    thread.start()

    def told(option: str, place: str) -> str:
        folder, root = folder_of(place), roots.get((option, place))
        if folder is None or root is None:
            return place
        path = "" if folder == root else f"{folder.name}/"
        return f"http://{address}:{PORT}/{numbers[option, place]}/{path}"

    try:
        variables = {
            OPTIONS[option]: " ".join(told(option, place) for place in places)
            for option, places in settings.items()
        }
        yield {**variables, "PIP_TRUSTED_HOST": address}
    finally:
        server.shutdown()
        server.server_close()
        thread.join(60)


class _Handler(SimpleHTTPRequestHandler):
    """/NUMBER/... is what lies in that folder."""

    def __init__(self, roots: Mapping[str, Path], *words: object) -> None:
        self._roots = roots
        super().__init__(*words)  # type: ignore[arg-type]

    def translate_path(self, path: str) -> str:
        number, _, rest = urlsplit(path).path.lstrip("/").partition("/")
        self.directory = str(self._roots.get(number, "/nonexistent"))
        return super().translate_path("/" + rest)

    def log_message(self, *words: object) -> None:
        """Say nothing: a build asks for hundreds of files."""
