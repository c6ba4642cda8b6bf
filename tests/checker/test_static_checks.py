"""Every static check: passed by a good environment, failed by one with the fault that it looks for."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict
from subjects import Here, Loose, folder_with, look, of_folder, run, walk

from openenv_core.checker.check import CheckLevel, checks
from openenv_core.checker.results import Status

UNDECLARED = {"example_actions", "imports_declared"}


def test_a_good_environment_passes(tmp_path: Path) -> None:
    with Here(walk(), folder_with(tmp_path)) as subject:
        report = run(subject, [one for one in checks() if one.level is CheckLevel.STATIC])
    assert report.ok, report.of(Status.FAILED, Status.CRASHED)
    assert {one.check for one in report.of(Status.SKIPPED)} == UNDECLARED


def in_validation(text: str) -> dict[str, Any]:
    return {"manifest": f"spec_version: 1\nname: x\nvalidation: {{{text}}}\n"}


@pytest.mark.parametrize(
    ("check", "files", "words"),
    [
        ("manifest_valid", {"manifest": None}, "openenv.yaml"),
        ("manifest_valid", {"manifest": "spec_version: 1\nname: x\nprot: 8000\n"}, "did you mean 'port'"),
        ("manifest_valid", {"manifest": "{"}, "to be YAML"),
        ("manifest_valid", in_validation("reward: {range: [1, 0]}"), "lower end first"),
        ("manifest_valid", {"manifest": "spec_version: 1\nname: x\napp: sever.app:app\n"}, "no sever/app.py"),
    ],
)
def test_a_fault_in_a_folder_is_found(check: str, files: Any, words: str, tmp_path: Path) -> None:
    result = of_folder(check, folder_with(tmp_path, **files))
    assert result.status is Status.FAILED, result
    assert words in result.message
    assert result.change


class Foreign(BaseModel):
    model_config = ConfigDict(extra="forbid")
    by: int = 1


@pytest.mark.parametrize(
    ("check", "app", "words"),
    [
        ("models_derived", walk(action=Foreign), "lacks metadata"),
        ("models_derived", walk(action=Loose), "got extra='ignore'"),
    ],
)
def test_a_fault_in_a_model_is_found(check: str, app: Any, words: str) -> None:
    result = look(check, app)
    assert result.status is Status.FAILED, result
    assert words in result.message
    assert result.change


@pytest.mark.parametrize(
    ("check", "validation", "status"),
    [
        ("example_actions", "episodes: {example_actions: [{by: 2}]}", Status.PASSED),
        ("example_actions", "episodes: {example_actions: [{by: 9}]}", Status.FAILED),
        ("example_actions", "episodes: {example_actions: []}", Status.SKIPPED),
    ],
)
def test_example_actions(check: str, validation: str, status: Status, tmp_path: Path) -> None:
    folder_with(tmp_path, **in_validation(validation))
    assert look(check, walk(), tmp_path).status is status


def test_an_app_that_cannot_be_imported_is_a_finding(tmp_path: Path) -> None:
    folder_with(tmp_path)
    (tmp_path / "server" / "app.py").write_text("raise RuntimeError('no engine')\n")
    result = of_folder("app_importable", tmp_path)
    assert result.status is Status.FAILED
    assert "no engine" in result.message


def project(dependencies: str, dev: str = "") -> str:
    return (
        f'[project]\nname = "x"\nversion = "1"\ndependencies = [{dependencies}]\n'
        f"[project.optional-dependencies]\ndev = [{dev}]\n"
    )


@pytest.mark.parametrize(
    ("code", "files", "status", "words"),
    [
        ("import yaml.nodes", {}, Status.FAILED, "got yaml (server/app.py, line 1)"),
        ("import pydantic, annotated_types", {}, Status.PASSED, ""),  # a dependency of pydantic
        ("import yaml", {"pyproject.toml": project('"PyYAML>=6"')}, Status.PASSED, ""),
        (
            "import yaml",
            {"pyproject.toml": project("\"pyyaml; python_version < '3'\"")},
            Status.FAILED,
            "yaml",
        ),
        ("import yaml", {"pyproject.toml": project("", '"pyyaml"')}, Status.FAILED, "got yaml"),
        ("def f():\n    import yaml", {"pyproject.toml": project("", '"pyyaml"')}, Status.PASSED, ""),
        ("def f():\n    import yaml", {}, Status.FAILED, "line 2"),
        ("try:\n    import yaml\nexcept ImportError:\n    pass", {}, Status.PASSED, ""),
        ("import yaml", {"server/requirements.txt": "# all\npyyaml>=6  # for lists\n"}, Status.PASSED, ""),
        ("import yaml", {"pyproject.toml": project('"openenv-core[core]"')}, Status.SKIPPED, "openenv-core"),
        ("import yaml", {"pyproject.toml": project('"pydantic[no-such]"')}, Status.SKIPPED, "[no-such]"),
        ("import yaml", {"pyproject.toml": None}, Status.SKIPPED, "requirements.txt"),
    ],
)
def test_imports_are_those_of_the_dependencies(
    code: str,
    files: dict[str, str | None],
    status: Status,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = {"server/app.py": f"{code}\n", "tests/test_app.py": "import pytest\n"}
    folder_with(tmp_path, **{"pyproject.toml": project('"pydantic"'), **own, **files})
    for name, file in (("app_of_this_test", "server/app.py"), ("test_of_this_test", "tests/test_app.py")):
        imported = ModuleType(name)
        imported.__file__ = str(tmp_path / file)
        monkeypatch.setitem(sys.modules, imported.__name__, imported)
    (tmp_path / "train.py").write_text("import numpy\n")  # which the application does not import
    result = look("imports_declared", walk(), tmp_path)
    assert result.status is status, result
    assert words in result.message
    if status is Status.FAILED:
        assert "add pyyaml to the dependencies" in result.change
