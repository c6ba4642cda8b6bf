"""Parts of the base image: the installed Ropewalk, and the health check."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import Distribution
from pathlib import Path

import counter
import pytest
from serving import serving

from openenv_core.errors import ConfigurationError
from openenv_core.images import base
from servers import create_app
from servers.security import Guard
from servers.settings import ServerSettings

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "dockerfiles" / "base" / "healthcheck.py"
TOKEN = "correct-horse-battery-staple"
WAIT_TIMEOUT_S = 60.0


@pytest.mark.slow
def test_source_tree_builds_a_reproducible_wheel_and_stays_unchanged(tmp_path: Path) -> None:
    before = {path.name for path in ROOT.iterdir()}
    wheels = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        requirement = base.copy_package(tmp_path / name)
        wheel = tmp_path / name / requirement.removesuffix("[server]")
        wheels.append(wheel.read_bytes())
        with zipfile.ZipFile(wheel) as archive:
            names = set(archive.namelist())
    assert wheels[0] == wheels[1]
    assert {
        "openenv_core/py.typed",
        "servers/app.py",
        "dockerfiles/base/Dockerfile",
        "envs/blackjack_env/openenv.yaml",
        "envs/blackjack_env/.dockerignore",
    } <= names
    assert not [name for name in names if "__pycache__" in name or name.startswith(("tests/", "scripts/"))]
    assert {path.name for path in ROOT.iterdir()} == before


def distribution_in(root: Path, **origin: object) -> Distribution:
    """Return a distribution in a folder of its own, as pip installs it."""
    information = root / "ropewalk-9.8.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: ropewalk\nVersion: 9.8\n")
    if origin:
        (information / "direct_url.json").write_text(json.dumps(origin))
    return Distribution.at(information)


@pytest.mark.slow
def test_packages_from_a_folder_or_repository_are_rebuilt_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "pyproject.toml").write_text(
        '[project]\nname = "ropewalk"\nversion = "9.9"\n[project.optional-dependencies]\nserver = ["fastapi"]\n'
    )
    for arguments in (
        ("init", "--quiet"),
        ("add", "."),
        ("-c", "user.name=A", "-c", "user.email=a@b", "commit", "-qm", "9.9"),
    ):
        subprocess.run(["git", *arguments], cwd=source, check=True)
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=source, text=True).strip()
    # As an egg-info beside the source, which is found first.
    checkout = distribution_in(tmp_path / "checkout")
    for name, kind in (
        ("folder", {"dir_info": {"editable": True}}),
        ("repository", {"vcs_info": {"vcs": "git", "commit_id": commit}}),
    ):
        installed = distribution_in(tmp_path / "site" / name, url=source.as_uri(), **kind)
        monkeypatch.setattr(base, "distributions", lambda name, found=(checkout, installed): found)
        (tmp_path / name).mkdir()
        assert base.copy_package(tmp_path / name) == "./ropewalk-9.9-py3-none-any.whl[server]"
        assert (tmp_path / name / "ropewalk-9.9-py3-none-any.whl").is_file()
    shutil.rmtree(source)
    (tmp_path / "none").mkdir()
    with pytest.raises(ConfigurationError, match="reinstall Ropewalk from a source that exists"):
        base.copy_package(tmp_path / "none")


def test_packages_from_an_index_are_downloaded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = distribution_in(tmp_path / "site")
    monkeypatch.setattr(base, "distributions", lambda name: [installed])
    (tmp_path / "made").mkdir()
    assert base.copy_package(tmp_path / "made") == "ropewalk[server]==9.8"
    assert list((tmp_path / "made").iterdir()) == []
    assert base.tags(base.Variant.BUILD) == ("ropewalk-base:9.8-build", "ropewalk-base:build")


def test_fingerprint_of_the_base_follows_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is installed into it is a file here; that it becomes the same wheel each time has a test of its own."""

    def fingerprint(installed_file: str) -> str:
        def place(folder: Path) -> str:
            (folder / "ropewalk.whl").write_text(installed_file)
            return "./ropewalk.whl"

        monkeypatch.setattr(base, "copy_package", place)
        with base.context() as request:
            assert (request.context / "healthcheck.py").is_file()
            return request.labels[base.FINGERPRINT]

    assert fingerprint("one") == fingerprint("one") != fingerprint("other")


async def checked(address: str, **variables: str) -> tuple[int | None, str]:
    known = {name: value for name, value in os.environ.items() if not name.startswith("ROPEWALK_TOKEN")}
    known |= {"PORT": address.rpartition(":")[2], **variables}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-IS", str(PROGRAM)), env=known, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await asyncio.wait_for(process.communicate(), WAIT_TIMEOUT_S)
    return process.returncode, output.decode()


async def test_health_check_of_a_guarded_server_needs_its_token(tmp_path: Path) -> None:
    file = tmp_path / "tokens.txt"
    file.write_text(f"# of the team\n\n{TOKEN}\n")
    app = create_app(counter.Counter, counter.Add, counter.Count, max_concurrent_envs=4)
    async with serving(app) as address:
        assert await checked(address) == (0, "")
    async with serving(Guard(app, ServerSettings(tokens=(TOKEN,)))) as address:  # type: ignore[arg-type]
        several = f"{TOKEN},another-token-of-good-length"
        for name, value in (("ROPEWALK_TOKENS", several), ("ROPEWALK_TOKEN_FILE", str(file))):
            assert await checked(address, **{name: value}) == (0, "")
        status, output = await checked(address)
        assert (status, "401" in output) == (1, True)
        assert "expected a healthy server on port" in output
    for variables, why in (
        ({}, "ConnectionRefusedError"),
        ({"ROPEWALK_TOKEN_FILE": "/nonexistent/tokens"}, "/nonexistent/tokens"),
    ):
        status, output = await checked(address, **variables)
        assert (status, why in output) == (1, True)
