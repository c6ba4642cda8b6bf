"""What a command's target is, and that a misspelt one never waits for an engine."""

import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingUnixStreamServer
from typing import Any
from urllib.parse import unquote

import pytest

from openenv_core import ConfigurationError
from openenv_core.targets import Target, TargetKind, importable_target, target_of


class _Engine(BaseHTTPRequestHandler):
    """A fake of Docker's engine that has one image."""

    paths: list[str]

    def do_GET(self) -> None:
        path = unquote(self.path)
        self.paths.append(path)
        found = path.endswith(("/version", "/_ping", "/images/team/game:1/json"))
        body = b'{"ApiVersion": "1.44"}' if found else b'{"message": "no such image"}'
        self.send_response(200 if found else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def address_string(self) -> str:
        return "here"

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def requested_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The paths of the requests that an engine got."""
    paths = list[str]()
    handler = type("Engine", (_Engine,), {"paths": paths})
    with ThreadingUnixStreamServer(str(tmp_path / "engine.sock"), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/engine.sock")
        yield paths
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("blackjak", "did you mean 'blackjack'"),
        ("blackjak-env", "did you mean 'blackjack'"),
        ("./envs/blackjak_env", "no folder or file at ./envs/blackjak_env; did you mean envs/blackjack_env"),
        ("envs/blackjak_env", "did you mean envs/blackjack_env"),
        ("nowhere/", "no folder or file at nowhere/; check the path"),
        ("dice.py", "no folder or file at dice.py"),
        ("docker://No Image", "expected docker:// and the name of an image"),
    ],
)
def test_misspelt_target_is_an_error_at_once(
    text: str, message: str, requested_paths: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "envs" / "blackjack_env").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=message):
        target_of(text)
    assert requested_paths == []


def test_engine_is_asked_last(
    requested_paths: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert target_of("docker://blackjack") == Target(TargetKind.IMAGE, "blackjack")
    assert target_of("blackjack").kind is TargetKind.NAME
    assert target_of("no.such.module:app").kind is target_of("nosuch:app").kind is TargetKind.MODULE
    assert requested_paths == []
    assert target_of("team/game:1") == Target(TargetKind.IMAGE, "team/game:1")
    with pytest.raises(
        ConfigurationError, match=r"there are: .*blackjack.*docker://IMAGE \(the Docker engine has no"
    ):
        target_of("team/game:2")
    assert [path.rpartition("/images/")[2] for path in requested_paths if "/images/" in path] == [
        "team/game:1/json",
        "team/game:2/json",
    ]
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    with pytest.raises(ConfigurationError, match="no Docker engine answers"):
        target_of("team/game:1")
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:1")
    monkeypatch.setitem(sys.modules, "docker", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'ropewalk\[docker\]'"):
        target_of("team/game:1")


@pytest.mark.parametrize("text", ["http://127.0.0.1:8000", "docker://blackjack"])
def test_what_runs_elsewhere_cannot_be_imported(text: str, requested_paths: list[str]) -> None:
    with pytest.raises(
        ConfigurationError, match=r"expected something to import, got .* Give FILE.py, module:attribute"
    ):
        importable_target(text)
    assert requested_paths == []
