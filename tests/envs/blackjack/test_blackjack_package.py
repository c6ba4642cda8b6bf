"""The distribution of its own, and the arrows: what the folder imports, and what importing it loads."""

import ast
import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "envs" / "blackjack_env"


def run(*command: str, cwd: Path, **variables: str) -> str:
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **variables}, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def setuptools_is_new_enough() -> bool:
    # Then nothing has to be downloaded; otherwise pip fetches what [build-system] asks for.
    try:
        return int(version("setuptools").split(".")[0]) >= 77
    except PackageNotFoundError:
        return False


@pytest.mark.slow
def test_the_wheel_builds_and_imports_under_its_own_name(tmp_path: Path) -> None:
    # A copy, since a build writes into the folder that it builds.
    source = tmp_path / "source"
    shutil.copytree(FOLDER, source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path)]
    if setuptools_is_new_enough():
        command.append("--no-build-isolation")
    run(*command, str(source), cwd=tmp_path)
    (wheel,) = tmp_path.glob("openenv_blackjack_env-*.whl")
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
        names = set(archive.namelist())
    sources = {path.relative_to(FOLDER) for path in FOLDER.rglob("*.py")}
    extras = {Path("openenv.yaml"), Path("README.md"), Path("py.typed")}
    assert {f"blackjack_env/{path.as_posix()}" for path in sources | extras} <= names
    said = run(
        sys.executable,
        "-c",
        "import blackjack_env, blackjack_env.server.app as app, blackjack_env.oracle as oracle\n"
        "print(app.__file__, blackjack_env.BlackjackEnv.default_app, round(oracle.optimal_return(), 4))",
        cwd=tmp_path,
        PYTHONPATH=os.pathsep.join([str(installed), str(ROOT)]),
    )
    assert str(installed) in said
    assert said.split()[-2:] == ["blackjack_env.server.app:app", "-0.0466"]


def test_the_callers_side_loads_no_server_and_no_gymnasium() -> None:
    said = run(
        sys.executable,
        "-c",
        "import sys, envs.blackjack_env, envs.blackjack_env.baselines\n"
        "print([m for m in ('gymnasium', 'fastapi', 'servers', 'torch', 'numpy') if m in sys.modules])",
        cwd=ROOT,
    )
    assert said.strip() == "[]"


def test_the_oracle_imports_nothing_of_the_project_but_the_odds() -> None:
    for name, allowed in (("odds.py", set()), ("oracle.py", {"odds"}), ("baselines.py", {"odds", "oracle"})):
        for node in ast.walk(ast.parse((FOLDER / name).read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                assert node.module in allowed
            elif isinstance(node, ast.ImportFrom):
                assert node.module in sys.stdlib_module_names | {"collections.abc"}
            elif isinstance(node, ast.Import):
                assert {alias.name for alias in node.names} <= sys.stdlib_module_names


@pytest.mark.slow
def test_the_readme_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (FOLDER / "README.md").read_text(), flags=re.DOTALL)
    assert len(blocks) == 2
    game, oracle = (run(sys.executable, "-W", "error", "-c", block, cwd=ROOT) for block in blocks)
    assert "The dealer holds" in game
    assert oracle == ""


def test_the_manifest_names_the_app() -> None:
    manifest = dict(
        line.split(": ", 1) for line in (FOLDER / "openenv.yaml").read_text().splitlines() if ": " in line
    )
    assert (manifest["name"], manifest["app"], manifest["port"]) == (
        "blackjack_env",
        "server.app:app",
        "8000",
    )
