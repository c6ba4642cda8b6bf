"""The released client of a Gitea server, against real git; a stand-in replaces Gitea."""

import json
import subprocess
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from openenv_core.compat.git_server import GitServerClient

NAME = "a game"


def git(*words: str, cwd: Path) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    return subprocess.run(
        ["git", *identity, *words], cwd=cwd, check=True, capture_output=True, text=True
    ).stdout.strip()


class StandIn(SimpleHTTPRequestHandler):
    """Serves bare repositories as files, and the list of them to whoever has a password."""

    def do_GET(self) -> None:
        if not self.path.startswith("/api/"):
            return super().do_GET()
        self.send_response(200 if self.headers["Authorization"] else 401)
        self.end_headers()
        self.wfile.write(json.dumps([{"name": NAME, "full_name": f"me/{NAME}", "clone_url": "c"}]).encode())
        return None

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    source, bare = tmp_path / "source", tmp_path / "served" / "me" / f"{NAME}.git"
    source.mkdir()
    git("init", "-q", "-b", "main", cwd=source)
    for text in ("one", "two"):
        (source / "file").write_text(text)
        git("add", ".", cwd=source)
        git("commit", "-qm", text, cwd=source)
    git("clone", "-q", "--bare", str(source), str(bare), cwd=tmp_path)
    git("update-server-info", cwd=bare)
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), partial(StandIn, directory=str(tmp_path / "served")))
    thread = Thread(target=httpd.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_address[1]}", source
    httpd.shutdown()
    thread.join()
    httpd.server_close()


def test_repositories_are_cloned_reset_and_queried(
    server: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, source = server
    monkeypatch.setenv("NO_PROXY", "fd00::/8,127.0.0.0/8")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    first, last = git("rev-parse", "HEAD^", cwd=source), git("rev-parse", "HEAD", cwd=source)
    client = GitServerClient(url, "me", "se:cret@", str(tmp_path / "workspace"))
    with pytest.raises(RuntimeError, match="not ready"):
        client.list_repositories()
    assert client.wait_for_ready()
    assert client.list_repositories()[0]["name"] == NAME
    clone = Path(client.clone_to_workspace(NAME, commit=first))
    assert client.get_current_commit(NAME) == first
    (clone / "file").write_text("changed")
    (clone / "more").touch()
    assert client.reset_workspace(NAME)
    assert client.get_current_commit(NAME) == last
    assert (clone / "file").read_text() == "two"
    assert not (clone / "more").exists()
    assert client.execute_git_command("log --format=%s -1", NAME) == (0, "two\n", "")
    assert client.execute_git_command("status", "absent")[0] == 1
    assert client.execute_git_command("status", "../..")[2].startswith("expected a folder below")
    with pytest.raises(RuntimeError, match="git clone failed"):
        client.clone_to_workspace("absent")
    for whole in (".", f"{NAME}/.."):
        with pytest.raises(RuntimeError, match="got the workspace"):
            client.clone_to_workspace(NAME, target_dir=whole)
        with pytest.raises(RuntimeError, match="got the workspace"):
            client.reset_workspace(whole)
    assert (clone / "file").exists()
    touch = f"alias.t='!touch {tmp_path}/pwned'"
    for options in (f"-c {touch} t", f"-C {source}", "--git-dir=/x"):
        assert client.execute_git_command(f"{options} status", NAME)[:2] == (1, "")
    assert not (tmp_path / "pwned").exists()
