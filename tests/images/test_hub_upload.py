"""Uploading a Space with the real library, to a fake hub on this machine."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from fake_hub import FakeHub, fake_hub

from openenv_core.errors import ConfigurationError
from openenv_core.images.errors import NotReached
from openenv_core.images.hub import upload

ROOT = Path(__file__).parents[2]


def push(
    hub: FakeHub, folder: Path, home: Path, *words: str, token: str | None
) -> subprocess.CompletedProcess[str]:
    # In a process of its own: the library reads its surroundings when it is imported.
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    surroundings = {**kept, "HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    if token is not None:
        surroundings["HF_TOKEN"] = token
    command = [sys.executable, "-m", "openenv_core.cli", "push", str(folder), "--space", "me/dice", *words]
    return subprocess.run(command, env=surroundings, cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "dice_env"
    (made / "server").mkdir(parents=True)
    (made / "server" / "Dockerfile").write_text("FROM python:3.11-slim\n")
    (made / "openenv.yaml").write_text("name: dice_env\n")
    (made / ".env").write_text("SECRET=1\n")
    return made


def test_a_space_is_made_and_filled_and_what_is_no_more_goes(folder: Path, tmp_path: Path) -> None:
    with fake_hub() as hub:
        hub.files = {"old.py": b"x", "README.md": b"y"}
        done = push(hub, folder, tmp_path, "--private", token=hub.token)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == f"{hub.url}/spaces/me/dice"
        (made,) = hub.created
        assert (made["name"], made["organization"], made["sdk"], made["type"]) == (
            "dice",
            "me",
            "docker",
            "space",
        )
        assert made.get("private") is True or made.get("visibility") == "private"
        assert set(hub.files) == {"Dockerfile", "README.md", "openenv.yaml"}
        assert b"sdk: docker" in hub.files["README.md"]


@pytest.mark.parametrize("client", ["httpx", "httpx2"])
def test_a_hub_that_does_not_answer_is_told_whatever_the_library_s_client_is(
    client: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class SilenceError(Exception):
        pass

    def refuse(*_: object, **__: object) -> None:
        raise SilenceError("nobody there")

    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", refuse)
    monkeypatch.setitem(sys.modules, client, SimpleNamespace(TransportError=SilenceError))
    with pytest.raises(NotReached, match="SilenceError: nobody there; see the network"):
        upload(tmp_path, "me/dice", private=False, endpoint="http://127.0.0.1:1")


def test_a_name_that_the_hub_does_not_allow(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="got 'me/my--env': Cannot have --"):
        upload(tmp_path, "me/my--env", private=False, endpoint="http://127.0.0.1:1")


@pytest.mark.soak
def test_a_hub_that_does_not_let_us_is_told_apart(folder: Path, tmp_path: Path) -> None:
    with fake_hub() as hub:
        without = push(hub, folder, tmp_path, token=None)
        assert without.returncode == 1
        assert "hf auth login" in without.stderr
        hub.refuses = True
        refused = push(hub, folder, tmp_path, token=hub.token)
        assert refused.returncode == 1
        assert "got 403: You don't have the rights" in refused.stderr
        assert hub.token not in refused.stderr + refused.stdout
        assert hub.files == {}
    gone = push(hub, folder, tmp_path, token=hub.token)
    assert gone.returncode == 1
    assert f"expected the hub at {hub.url} to answer" in gone.stderr
