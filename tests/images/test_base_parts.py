"""What the base image is made from: the installed Ropewalk, and the health check."""

import asyncio
import csv
import io
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import Distribution
from pathlib import Path

import counter
import pytest
from serving import serving

from openenv_core.images import base
from openenv_core.images import base as installed
from servers import create_app
from servers.security import Guard
from servers.settings import ServerSettings

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "dockerfiles" / "base" / "healthcheck.py"
TOKEN = "correct-horse-battery-staple"
WAIT_S = 20.0


def test_a_source_tree_becomes_an_archive_of_what_is_shipped(tmp_path: Path) -> None:
    placed = installed.place(tmp_path)
    (archive,) = tmp_path.iterdir()
    assert placed.requirement == f"./{archive.name}"
    needed = {line.split(">")[0].split("=")[0] for line in placed.dependencies}
    assert needed == {"httpx", "picows", "pydantic", "pyyaml", "fastapi", "uvicorn", "websockets"}
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    assert {
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "openenv_core/py.typed",
        "servers/app.py",
        "dockerfiles/base/Dockerfile",
        "envs/blackjack_env/openenv.yaml",
        "envs/blackjack_env/.dockerignore",
    } <= names
    assert not [
        name for name in names if "__pycache__" in name or name.startswith(("tests/", "scripts/", "."))
    ]


def test_the_same_source_gives_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = tmp_path / "tree"
    (tree / "ours").mkdir(parents=True)
    for name in ("README.md", "LICENSE", "ours/__init__.py"):
        (tree / name).write_text("x")
    shutil.copyfile(ROOT / "pyproject.toml", tree / "pyproject.toml")
    monkeypatch.setattr(installed, "source_tree", lambda: tree)
    made = []
    for later, name in enumerate(("one", "two")):
        (tmp_path / name).mkdir()
        os.utime(tree / "LICENSE", (later, later))
        monkeypatch.setattr("time.time", lambda later=later: 1_800_000_000.0 + 100 * later)
        installed.place(tmp_path / name)
        (archive,) = (tmp_path / name).iterdir()
        made.append(archive.read_bytes())
    assert made[0] == made[1]


class Elsewhere:
    """A distribution in a folder of its own, as pip leaves one."""

    def __init__(self, root: Path, *, direct: bool) -> None:
        information = root / "ropewalk-9.8.dist-info"
        (root / "ropepackage").mkdir(parents=True)
        information.mkdir()
        (root / "ropepackage" / "__init__.py").write_text("ANSWER = 42\n")
        (root / "ropepackage" / "__pycache__").mkdir()
        (root / "ropepackage" / "__pycache__" / "x.pyc").write_bytes(b"no")
        (information / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: ropewalk\nVersion: 9.8\nProvides-Extra: server\nProvides-Extra: author\n"
            'Requires-Dist: pydantic>=2.9\nRequires-Dist: fastapi>=0.115; extra == "server"\n'
            "Requires-Dist: tomli; python_version < '3.11'\nRequires-Dist: rich; extra == 'author'\n"
        )
        (information / "WHEEL").write_text(
            "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        (information / "INSTALLER").write_text("pip\n")
        if direct:
            (information / "direct_url.json").write_text('{"url": "file:///somewhere", "dir_info": {}}')
        listed = [
            "ropepackage/__init__.py",
            "ropepackage/__pycache__/x.pyc",
            "../../../bin/ropewalk",
            *(f"{information.name}/{path.name}" for path in information.iterdir()),
            f"{information.name}/RECORD",
        ]
        (information / "RECORD").write_text("".join(f"{name},,\n" for name in listed))
        self.distribution = Distribution.at(information)


@pytest.fixture
def no_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "source_tree", lambda: None)


@pytest.mark.usefixtures("no_tree")
@pytest.mark.slow
def test_what_came_from_a_folder_is_packed_into_a_wheel_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = Elsewhere(tmp_path / "site", direct=True)
    monkeypatch.setattr(installed, "distribution", lambda _: there.distribution)
    (tmp_path / "made").mkdir()
    placed = installed.place(tmp_path / "made")
    wheel = tmp_path / "made" / placed.requirement
    assert placed.dependencies == ("pydantic>=2.9", "fastapi>=0.115", "tomli; python_version < '3.11'")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        record = {
            row[0]: row[1:]
            for row in csv.reader(io.StringIO(archive.read("ropewalk-9.8.dist-info/RECORD").decode()))
        }
    assert names == {
        "ropepackage/__init__.py",
        "ropewalk-9.8.dist-info/METADATA",
        "ropewalk-9.8.dist-info/WHEEL",
        "ropewalk-9.8.dist-info/RECORD",
    }
    assert set(record) == names
    assert record["ropepackage/__init__.py"][0].startswith("sha256=")
    # pip holds the digests in RECORD against the files.
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*command, "--target", tmp_path / "again", wheel], check=True, timeout=60)
    assert (tmp_path / "again" / "ropepackage" / "__init__.py").read_text() == "ANSWER = 42\n"


@pytest.mark.usefixtures("no_tree")
def test_what_came_from_an_index_comes_from_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = Elsewhere(tmp_path / "site", direct=False)
    monkeypatch.setattr(installed, "distribution", lambda _: there.distribution)
    (tmp_path / "made").mkdir()
    assert installed.place(tmp_path / "made").requirement == "ropewalk==9.8"
    assert list((tmp_path / "made").iterdir()) == []
    assert base.tags(base.Variant.BUILD) == ("ropewalk-base:9.8-build", "ropewalk-base:build")


@pytest.mark.slow
def test_the_base_s_fingerprint_follows_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    def fingerprint() -> str:
        with base.context() as request:
            assert (request.context / "healthcheck.py").is_file()
            return request.labels[base.FINGERPRINT]

    before = fingerprint()
    assert fingerprint() == before

    def placed_otherwise(folder: Path) -> installed.Placed:
        (folder / "other").write_text("x")
        return installed.Placed(".", ("x",))

    monkeypatch.setattr(installed, "place", placed_otherwise)
    assert fingerprint() != before


# ---- the health check


async def checked(address: str, **variables: str) -> tuple[int | None, str]:
    known = {name: value for name, value in os.environ.items() if not name.startswith("ROPEWALK_TOKEN")}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-IS",
        str(PROGRAM),
        env={**known, "PORT": address.rpartition(":")[2], **variables},
        stdout=asyncio.subprocess.PIPE,
    )
    said, _ = await asyncio.wait_for(process.communicate(), WAIT_S)
    return process.returncode, said.decode()


async def test_a_guarded_server_is_healthy_to_those_who_know_its_token(tmp_path: Path) -> None:
    file = tmp_path / "tokens.txt"
    file.write_text(f"# of the team\n\n{TOKEN}\n")
    app = create_app(counter.Counter, counter.Add, counter.Count, max_concurrent_envs=4)
    async with serving(Guard(app, ServerSettings(tokens=(TOKEN,)))) as address:  # type: ignore[arg-type]
        for known in (
            {"ROPEWALK_TOKENS": f"{TOKEN},another-token-of-good-length"},
            {"ROPEWALK_TOKEN_FILE": str(file)},
        ):
            assert await checked(address, **known) == (0, "")
        status, said = await checked(address)
        assert status == 1
        assert "expected a healthy server on port" in said
        assert "401" in said


async def test_a_server_without_tokens_is_healthy_to_all_and_failures_say_why() -> None:
    async with serving(
        create_app(counter.Counter, counter.Add, counter.Count, max_concurrent_envs=4)
    ) as address:
        assert await checked(address) == (0, "")
    for variables, why in (
        ({}, "ConnectionRefusedError"),
        ({"ROPEWALK_TOKEN_FILE": "/nonexistent/tokens"}, "/nonexistent/tokens"),
    ):
        status, said = await checked(address, **variables)
        assert status == 1
        assert why in said
