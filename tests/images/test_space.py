"""A Space: its files, and their upload by the real library to a fake hub on this machine."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import yaml
from fake_hub import FakeHub, fake_hub

from openenv_core.cli.main import main
from openenv_core.errors import ConfigurationError
from openenv_core.images.engine import PushError
from openenv_core.images.space import PARTS, StagedSpace, stage, upload, with_default

ROOT = Path(__file__).parents[2]
BLACKJACK = ROOT / "envs" / "blackjack_env"


def folder(tmp_path: Path, dockerfile: str = "FROM python:3.11-slim\nCMD x\n") -> Path:
    env_folder = tmp_path / "dice_env"
    (env_folder / "server").mkdir(parents=True)
    (env_folder / "server" / "Dockerfile").write_text(dockerfile)
    (env_folder / "openenv.yaml").write_text("spec_version: 1\nname: dice_env\nport: 9000  # so\n")
    (env_folder / "README.md").write_text("# Dice\n\nTwo of them.\n")
    return env_folder


def staged(source: Path, tmp_path: Path) -> tuple[StagedSpace, Path]:
    into = tmp_path / "staged"
    into.mkdir()
    return stage(source, into), into


def card(into: Path) -> dict[str, object]:
    _, top, rest = (into / "README.md").read_text().split("---\n", 2)
    assert rest.startswith("\n# ")
    return dict(yaml.safe_load(top))


def stages_of(dockerfile: str) -> list[tuple[str, str]]:
    """Return the base and the name, possibly "", of each stage."""
    return re.findall(r"(?m)^FROM (\S+)(?: AS (\S+))?$", dockerfile)


@pytest.mark.slow
def test_space_of_blackjack_builds_its_own_base(tmp_path: Path) -> None:
    space_name, into = staged(BLACKJACK, tmp_path)
    included = {"Dockerfile", "README.md", "openenv.yaml", "server/app.py", f"{PARTS}/healthcheck.py"}
    assert included <= set(space_name.files)
    assert "server/Dockerfile" not in space_name.files
    assert not [name for name in space_name.files if "__pycache__" in name or name.endswith(".env")]
    dockerfile = (into / "Dockerfile").read_text()
    # Everything stands on the one image that the hub can pull.
    stages = stages_of(dockerfile)
    made_here = {name for _, name in stages}
    assert {base for base, _ in stages} - made_here == {"${PYTHON_IMAGE}"}
    assert f"\nARG PARTS={PARTS}\n" in dockerfile
    (wheel,) = re.findall(r"(?m)^ARG ROPEWALK=(\S+)\[server\]$", dockerfile)
    assert (into / PARTS / "ropewalk" / wheel).is_file()
    assert stages[-1][0] == "ropewalk-runtime"
    # What only released folders need is not made.
    assert "ropewalk-build" not in dockerfile
    assert (into / ".dockerignore").read_text().endswith(f"!{PARTS}\n!{PARTS}/**\n")


def test_metadata_of_the_author_stay_and_unreadable_ones_are_refused(tmp_path: Path) -> None:
    source = folder(tmp_path)
    _, into = staged(source, tmp_path)
    ours = {"title": "Dice", "sdk": "docker", "app_port": 9000, "tags": ["openenv"]}
    assert ours.items() <= card(into).items()
    assert (into / "README.md").read_text().endswith("# Dice\n\nTwo of them.\n")
    (source / "README.md").write_text("---\ntitle: Mine\nsdk: gradio\nlicense: mit\n---\n\n# Dice\n")
    stage(source, into)
    assert {"title": "Mine", "sdk": "docker", "license": "mit"}.items() <= card(into).items()
    for top in ("a: [", "- a\n- b", "date: 2026-02-30"):
        (source / "README.md").write_text(f"---\n{top}\n---\n")
        with pytest.raises(ConfigurationError, match=r"between the --- of README\.md"):
            stage(source, into)
    (source / "README.md").write_bytes("Würfel".encode("latin-1"))
    with pytest.raises(ConfigurationError, match=r"README\.md in UTF-8"):
        stage(source, into)


def test_directives_stay_on_top_and_stages_keep_their_names(tmp_path: Path) -> None:
    text = (
        "# syntax=docker/dockerfile:1\nARG BASE_IMAGE=openenv-base:latest\nFROM $BASE_IMAGE AS builder\n"
        "FROM ${BASE_IMAGE:-x}\nCOPY --from=builder a b\n"
    )
    _, into = staged(folder(tmp_path, text), tmp_path)
    dockerfile = (into / "Dockerfile").read_text()
    assert dockerfile.startswith("# syntax=docker/dockerfile:1\n")
    assert stages_of(dockerfile)[-2:] == [("ropewalk-build", "builder"), ("ropewalk-build", "")]
    assert "ARG BASE_IMAGE" not in dockerfile
    assert dockerfile.endswith("\nENV ROPEWALK_ALLOWED_HOSTS=*.hf.space ENABLE_WEB_INTERFACE=true\n")


def test_required_files_are_included_despite_ignore_rules(tmp_path: Path) -> None:
    source = folder(tmp_path)
    (source / ".gitignore").write_text("*\n")
    (source / "notes.txt").write_text("x")
    included, _ = staged(source, tmp_path)
    assert set(included.files) == {"Dockerfile", "README.md", "openenv.yaml"}
    assert included.left_out["notes.txt"] == ".gitignore"


def test_file_with_a_token_stops_the_upload_and_so_does_a_folder_without_its_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="folder with server/Dockerfile or"):
        staged(tmp_path, tmp_path)
    source, into = folder(tmp_path), tmp_path / "staged"
    (source / "server" / "app.py").write_text(f"TOKEN = 'hf_{'a1B2' * 9}'\n")
    with pytest.raises(ConfigurationError, match=r"a token or a private key in server/app\.py"):
        stage(source, into)
    (source / "openenv.yaml").unlink()
    with pytest.raises(ConfigurationError, match=r"folder with openenv\.yaml"):
        stage(source, into)


def test_default_port_is_changed_everywhere() -> None:
    text = "ARG A=1\nARG AB=1\nFROM x\nARG A\nRUN echo ARG A=1\n"
    assert with_default(text, "A", "2") == "ARG A=2\nARG AB=1\nFROM x\nARG A=2\nRUN echo ARG A=1\n"


def test_dry_run_lists_files_without_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = folder(tmp_path)
    (source / ".env").write_text("SECRET=1\n")
    # Whoever would be asked is not there.
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nothing.sock")
    monkeypatch.setattr("openenv_core.images.space.upload", None)
    assert main(["push", str(source), "--space", "me/dice", "--private", "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert "would upload 3 files" in output
    assert "(private if it is new, sdk docker, port 9000)" in output
    assert "Dockerfile\n" in output
    assert "left out: .env (may hold a secret)" in output


def test_invalid_options_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    source = str(folder(tmp_path))
    for arguments, expected in (
        (["--space", "dice"], "expected --space OWNER/NAME, got 'dice'"),
        (["--space", "me/dice", "--registry", "a.b"], "both --registry and --space are given"),
        (["--space", "me/dice", source], "expected one folder for a Space, got 2"),
        (["--registry", "a.b/c", "--dry-run"], "expected --dry-run with --space"),
        (["--registry", "a.b/c", "--private"], "expected --private with --space"),
        ([], "expected --registry HOST[:PORT]/NAMESPACE for dice-env:latest"),
        (["--registry", "https://a.b/c"], "without a scheme"),
    ):
        assert main(["push", source, *arguments]) == 2
        assert expected in capsys.readouterr().err


def push(
    hub: FakeHub, source: Path, home: Path, *words: str, token: str | None
) -> subprocess.CompletedProcess[str]:
    # In a process of its own: the library reads its surroundings when it is imported.
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    surroundings = {
        **variables,
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    if token is not None:
        surroundings["HF_TOKEN"] = token
    command = [sys.executable, "-m", "openenv_core.cli", "push", str(source), "--space", "me/dice", *words]
    return subprocess.run(command, env=surroundings, cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.mark.slow
def test_space_is_created_filled_and_old_files_deleted(tmp_path: Path) -> None:
    dice = folder(tmp_path)
    (dice / ".env").write_text("SECRET=1\n")
    with fake_hub() as hub:
        hub.files = {"old.py": b"x", "README.md": b"y"}
        done = push(hub, dice, tmp_path, "--private", token=hub.token)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == f"{hub.url}/spaces/me/dice"
        (space,) = hub.created
        assert (space["organization"], space["name"]) == ("me", "dice")
        assert (space["type"], space["sdk"]) == ("space", "docker")
        assert space.get("private") is True or space.get("visibility") == "private"
        assert set(hub.files) == {"Dockerfile", "README.md", "openenv.yaml"}
        assert b"sdk: docker" in hub.files["README.md"]


@pytest.mark.parametrize("client", ["httpx", "httpx2"])
def test_unreachable_hub_is_reported_for_any_client_library(
    client: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class SilenceError(Exception):
        pass

    def refuse(*_: object, **__: object) -> None:
        raise SilenceError("nobody there")

    with pytest.raises(ConfigurationError, match="got 'me/my--env': Cannot have --"):
        upload(tmp_path, "me/my--env", private=False, endpoint="http://127.0.0.1:1")
    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", refuse)
    monkeypatch.setitem(sys.modules, client, SimpleNamespace(TransportError=SilenceError))
    with pytest.raises(PushError, match="SilenceError: nobody there; log in"):
        upload(tmp_path, "me/dice", private=False, endpoint="http://127.0.0.1:1")


@pytest.mark.soak
def test_refused_access_to_the_hub_is_its_own_error(tmp_path: Path) -> None:
    dice = folder(tmp_path)
    with fake_hub() as hub:
        without = push(hub, dice, tmp_path, token=None)
        assert without.returncode == 1
        assert "hf auth login" in without.stderr
        hub.refuses = True
        refused = push(hub, dice, tmp_path, token=hub.token)
        assert refused.returncode == 1
        assert "You don't have the rights" in refused.stderr
        assert hub.token not in refused.stderr + refused.stdout
        assert hub.files == {}
    gone = push(hub, dice, tmp_path, token=hub.token)
    assert gone.returncode == 1
    assert f"expected the hub at {hub.url} to take me/dice, got ConnectError" in gone.stderr
