"""The distribution of its own, and the arrows: what the folder imports, and what importing it loads."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "envs" / "code_interpreter_env"


def run(*command: str, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_distribution_names_every_package_of_the_folder() -> None:
    told = tomllib.loads((FOLDER / "pyproject.toml").read_text())["tool"]["setuptools"]
    there = {file.parent.relative_to(FOLDER) for file in FOLDER.rglob("*.py")}
    names = {".".join(("code_interpreter_env", *folder.parts)) for folder in there}
    assert set(told["packages"]) == names == set(told["package-dir"])


@pytest.mark.soak
def test_the_wheel_holds_everything(tmp_path: Path) -> None:
    # A copy, since a build writes into the folder that it builds.
    source = tmp_path / "source"
    shutil.copytree(FOLDER, source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    run(*command, "--wheel-dir", str(tmp_path), str(source), cwd=tmp_path)
    (wheel,) = tmp_path.glob("openenv_code_interpreter_env-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    kinds = ("*.py", "*.jsonl", "py.typed", "openenv.yaml", "README.md")
    files = {path.relative_to(FOLDER).as_posix() for kind in kinds for path in FOLDER.rglob(kind)}
    assert {f"code_interpreter_env/{name}" for name in files} <= names


def test_the_callers_side_loads_no_server() -> None:
    loads = ("fastapi", "servers", "numpy", "envs.code_interpreter_env.server")
    said = run(
        sys.executable,
        "-c",
        f"import sys, envs.code_interpreter_env\nprint([m for m in {loads} if m in sys.modules])",
        cwd=ROOT,
    )
    assert said.strip() == "[]"


@pytest.mark.slow
def test_the_readme_runs() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (FOLDER / "README.md").read_text(), flags=re.DOTALL)
    said = run(sys.executable, "-W", "error", "-c", block, cwd=ROOT)
    assert said == "[3, 4]\n 7\nerror ZeroDivisionError\n"
