"""Parts of the base image: the installed Ropewalk, and the health check."""

import asyncio
import os
import re
import shutil
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
        placed = base.copy_package(tmp_path / name)
        wheel = tmp_path / name / placed.requirement
        wheels.append(wheel.read_bytes())
        needed = {re.split("[><=]", line)[0] for line in placed.dependencies}
        assert {
            "httpx",
            "pydantic",
            "fastapi",
            "uvicorn",
        } <= needed  # those of the core and of the extra server
        assert not needed & {"huggingface-hub", "jsonschema", "mcp", "torch"}
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


def distribution_in(root: Path, source: Path | None = None) -> Distribution:
    """Return a distribution in a folder of its own, as pip installs it."""
    information = root / "ropewalk-9.8.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: ropewalk\nVersion: 9.8\nProvides-Extra: server\nProvides-Extra: author\n"
        'Requires-Dist: pydantic>=2.9\nRequires-Dist: fastapi>=0.115; extra == "server"\n'
        "Requires-Dist: tomli; python_version < '3.11'\nRequires-Dist: rich; extra == 'author'\n"
    )
    if source is not None:
        url = f'{{"url": "{source.as_uri()}", "dir_info": {{}}}}'
        (information / "direct_url.json").write_text(url)
    return Distribution.at(information)


@pytest.fixture
def no_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "source_tree", lambda: None)


@pytest.mark.usefixtures("no_tree")
@pytest.mark.slow
def test_packages_from_a_folder_are_rebuilt_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "pyproject.toml").write_text(
        '[project]\nname = "ropewalk"\nversion = "9.9"\ndependencies = ["pydantic>=2.9"]\n'
        '[project.optional-dependencies]\nserver = ["fastapi>=0.115"]\nauthor = ["rich"]\n'
    )
    there = distribution_in(tmp_path / "site", source)
    monkeypatch.setattr(base, "distribution", lambda _: there)
    (tmp_path / "made").mkdir()
    placed = base.copy_package(tmp_path / "made")
    assert placed.requirement == "./ropewalk-9.9-py3-none-any.whl"
    assert placed.dependencies == ("pydantic>=2.9", "fastapi>=0.115")
    shutil.rmtree(source)
    (tmp_path / "none").mkdir()
    with pytest.raises(ConfigurationError, match="reinstall Ropewalk from a source that exists"):
        base.copy_package(tmp_path / "none")


@pytest.mark.usefixtures("no_tree")
def test_packages_from_an_index_are_downloaded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = distribution_in(tmp_path / "site")
    monkeypatch.setattr(base, "distribution", lambda _: there)
    (tmp_path / "made").mkdir()
    assert base.copy_package(tmp_path / "made") == base.PlacedPackage(
        "ropewalk==9.8", ("pydantic>=2.9", "fastapi>=0.115", "tomli; python_version < '3.11'")
    )
    assert list((tmp_path / "made").iterdir()) == []
    assert base.tags(base.Variant.BUILD) == ("ropewalk-base:9.8-build", "ropewalk-base:build")


def test_fingerprint_of_the_base_follows_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is installed into it is a file here; that it becomes the same wheel each time has a test of its own."""

    def fingerprint(installed_file: str) -> str:
        def place(folder: Path) -> base.PlacedPackage:
            (folder / "ropewalk.whl").write_text(installed_file)
            return base.PlacedPackage("./ropewalk.whl", ("pydantic>=2.9",))

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
