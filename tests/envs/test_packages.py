"""Each environment's folder as a package of its own: a distribution, light imports, a README that runs."""

import os
import re
import shutil
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from module_run import finished

ROOT = Path(__file__).resolve().parents[2]
ENVS = {
    name: ROOT / "envs" / f"{name}_env"
    for name in (
        "blackjack",
        "code_interpreter",
        "harbor",
        "mcp_tools",
        "reasoning",
        "shop",
        "sqlite",
        "kuhn",
        "negotiation",
    )
}


def one_in_the_second_tier(quick: str) -> Any:
    marks = {name: pytest.mark.slow if name == quick else pytest.mark.soak for name in ENVS}
    return pytest.mark.parametrize("name", [pytest.param(name, marks=marks[name]) for name in ENVS])


def run(*command: str, cwd: Path = ROOT, **variables: str) -> str:
    done = finished(*command, cwd=cwd, env={**os.environ, **variables}, timeout_s=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ENVS)
def test_the_distribution_names_every_package_and_the_manifest_its_app(name: str) -> None:
    folder = ENVS[name]
    settings = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {file.parent.relative_to(folder) for file in folder.rglob("*.py")}
    packages = {".".join((folder.name, *one.parts)) for one in folders}
    assert set(settings["packages"]) == packages == set(settings["package-dir"])
    manifest = yaml.safe_load((folder / "openenv.yaml").read_text())
    assert (manifest["name"], manifest["app"], manifest["port"]) == (folder.name, "server.app:app", 8000)


def test_the_callers_side_loads_no_server_and_no_world() -> None:
    heavy = ["gymnasium", "reasoning_gym", "numpy", "torch", "fastapi", "servers", "sqlite3"]
    heavy += ["envs.shop_env.world", "envs.sqlite_env.world", *(f"envs.{name}_env.server" for name in ENVS)]
    imports = ", ".join(["envs.blackjack_env.baselines", *(f"envs.{name}_env" for name in ENVS)])
    code = f"import sys, {imports}\nprint([name for name in {heavy} if name in sys.modules])"
    assert run(sys.executable, "-c", code).strip() == "[]"


def test_a_server_of_blackjack_starts_without_gymnasium_but_not_if_it_is_missing() -> None:
    code = "import sys, envs.blackjack_env.server.app; print({'gymnasium', 'numpy'} & set(sys.modules))"
    assert run(sys.executable, "-c", code).strip() == "set()"
    code = "import sys, servers.target; sys.modules['gymnasium'] = None; servers.target.load_app('blackjack')"
    done = finished(sys.executable, "-c", code, cwd=ROOT, env=dict(os.environ), timeout_s=100)
    assert "No module named 'gymnasium'; pip install 'ropewalk[gymnasium]'" in done.stderr


@one_in_the_second_tier("sqlite")
def test_the_wheel_holds_everything_and_imports_under_its_own_name(name: str, tmp_path: Path) -> None:
    folder = ENVS[name]
    # A copy, since a build writes into the folder that it builds.
    source = tmp_path / "source"
    shutil.copytree(folder, source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    run(*command, "--wheel-dir", str(tmp_path), str(source), cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
        packed = set(archive.namelist())
    kinds = ("*.py", "*.jsonl", "py.typed", "openenv.yaml", "README.md")
    files = {path.relative_to(folder).as_posix() for kind in kinds for path in folder.rglob(kind)}
    assert {f"{folder.name}/{file}" for file in files} <= packed
    code = f"import {folder.name}.server.app as app; print(app.__file__)"
    path = os.pathsep.join([str(installed), str(ROOT)])
    assert str(installed) in run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=path)


README_OUTPUT = {
    "blackjack": r"(?s).*The dealer holds.*",
    "code_interpreter": r"\[3, 4\]\n 7\nerror ZeroDivisionError\n",
    "harbor": r"Write into `count.txt`.*\n1\.0\n",
    "mcp_tools": None,
    "reasoning": r".* =\n[01]\.0 -?\d+\n",
    "shop": r"(?s).*^0\.0 True\n",
    "sqlite": r"(?s).*(wrong 0\.0|right 1\.0) True\n",
}
"""What the blocks of Python of a README print together; None stands for what its own comments say."""


@one_in_the_second_tier("blackjack")
def test_the_readme_runs(name: str) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ENVS[name] / "README.md").read_text(), flags=re.DOTALL)
    assert blocks
    printed = "".join(run(sys.executable, "-W", "error", "-c", block) for block in blocks)
    expected = README_OUTPUT[name]
    if expected is None:
        comments = [line.partition("#")[2].strip() for line in blocks[0].splitlines() if "print(" in line]
        assert [line.strip("[]").replace("'", "") for line in printed.splitlines()] == comments
    else:
        assert re.fullmatch(expected, printed, re.MULTILINE), printed
