"""Folders that `ropewalk init` makes: names, contents, and refusals."""

import ast
import re
import shutil
import sys
from pathlib import Path

import pytest
import released
from module_run import finished

from openenv_core.cli.main import main
from openenv_core.errors import ConfigurationError
from openenv_core.manifest import read_manifest
from openenv_core.scaffold import making
from openenv_core.scaffold.making import TEMPLATES, make
from openenv_core.scaffold.names import LONGEST, EnvironmentNames, names_of

FOLDER = Path(making.__file__).with_name("templates")
NAMES = EnvironmentNames("rock_paper")
PARTS = {
    *(".dockerignore", ".gitignore", "README.md", "openenv.yaml", "py.typed", "pyproject.toml"),
    *("__init__.py", "client.py", "models.py"),
    *("server/Dockerfile", "server/__init__.py", "server/app.py", "server/environment.py"),
    *("tests/__init__.py", "tests/test_checks.py"),
}


def files(folder: Path) -> dict[str, str]:
    found = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in found}


@pytest.fixture(params=TEMPLATES)
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return make(NAMES, request.param, tmp_path)


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_folder_is_whole_and_has_its_own_name_everywhere(made: Path) -> None:
    found = files(made)
    assert made.name == "rock_paper_env"
    assert set(found) >= PARTS
    assert not [name for name in found if "pycache" in name or name.endswith(".pyc")]
    for name, text in found.items():
        assert not re.search("place.?holder", f"{name} {text}", re.IGNORECASE), name
    assert "class RockPaperEnv(" in found["client.py"]
    assert 'env_name="rock_paper"' in found["server/app.py"]
    assert 'name = "openenv-rock-paper-env"' in found["pyproject.toml"]
    assert ("gymnasium" in found["pyproject.toml"]) is ("gymnasium" in found["server/environment.py"])
    assert '"rock_paper_env.server.app:app"' in found["server/Dockerfile"]
    assert found["README.md"].startswith("# Rock Paper\n")
    assert read_manifest(made).name == "rock_paper_env"
    for path in made.rglob("*.py"):
        assert ast.get_docstring(ast.parse(path.read_text())), path
    (made.parent / "plain").mkdir()
    assert made.stat().st_mode == (made.parent / "plain").stat().st_mode, "other people can read it"


def test_its_caller_loads_no_server(made: Path) -> None:
    code = (
        f"import sys, {made.name} as made\nprint(made.RockPaperEnv.default_app)\n"
        "print([m for m in ('gymnasium', 'fastapi', 'servers', 'numpy') if m in sys.modules])"
    )
    done = finished(sys.executable, "-c", code, cwd=made.parent, timeout_s=60)
    assert done.stdout.splitlines() == ["rock_paper_env.server.app:app", "[]"], done.stderr


def test_template_files_equal_those_of_blackjack() -> None:
    ours = released.ROOT / "envs" / "blackjack_env"
    for name in (".dockerignore", "server/Dockerfile"):
        text = (FOLDER / "game" / name).read_text()
        expected = (ours / name).read_text().replace("build envs/blackjack_env`", "build`")
        assert text.replace("place_holder", "blackjack") == expected


def test_folder_is_made_where_nothing_is_and_nowhere_else(tmp_path: Path) -> None:
    (tmp_path / "there" / NAMES.package).mkdir(parents=True)
    for parent in ("there", "new/newer"):
        assert (make(NAMES, "game", tmp_path / parent) / "openenv.yaml").is_file()
        assert entries(tmp_path / parent) == [NAMES.package]
    mine = tmp_path / "mine" / NAMES.package
    mine.mkdir(parents=True)
    (mine / "mine").write_text("mine")
    with pytest.raises(ConfigurationError, match="a folder with something in it"):
        make(NAMES, "game", mine.parent)
    assert files(mine.parent) == {f"{NAMES.package}/mine": "mine"}
    linked = tmp_path / "linked" / NAMES.package
    linked.parent.mkdir()
    linked.symlink_to("nowhere")  # is not followed
    with pytest.raises(ConfigurationError, match="something else of that name"):
        make(NAMES, "game", linked.parent)
    assert entries(linked.parent) == [NAMES.package]
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="choose another place"):
        make(NAMES, "game", tmp_path / "file")


def test_caches_and_modes_of_a_template_are_not_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = tmp_path / "templates" / "game"
    shutil.copytree(FOLDER / "game", template)
    for name in ("__pycache__", "server/__pycache__", ".pytest_cache"):
        (template / name).mkdir(exist_ok=True)
        (template / name / "left").write_bytes(b"\xff")
    (template / "models.pyc").write_bytes(b"\xff")
    (template / "server").chmod(0o555)
    monkeypatch.setattr(making, "_FOLDER", template.parent)
    folder = make(NAMES, "game", tmp_path)
    (template / "server").chmod(0o755)
    assert set(files(folder)) == PARTS
    assert (folder / "server").stat().st_mode & 0o700 == 0o700


def test_command_says_what_it_made_and_what_to_do_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "rock-paper", "--template", "tools"]) == 0
    output = capsys.readouterr().out
    assert "cd rock_paper_env\n" in output
    for word in ("play .", "serve . --reload", "pytest", "validate .", "build .", "validate rock-paper-env:"):
        assert word in output
    assert "pip install gymnasium" not in output
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    assert main(["init", "cart", "--template", "gymnasium"]) == 0
    assert "pip install gymnasium" in capsys.readouterr().out
    assert main(["init", "cart", "--package"]) == 2
    assert main(["init", "dice", "--template", "tool"]) == 2
    output = capsys.readouterr().err
    assert "a folder with something in it" in output
    assert "did you mean 'tools'?" in output
    assert entries(tmp_path) == ["cart_env", "rock_paper_env"]


def test_a_file_its_test_and_a_task_are_written_beside_each_other_and_over_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "rock-paper"]) == 0
    assert entries(tmp_path) == ["rock_paper.py", "test_rock_paper.py"]
    assert "class RockPaper(Environment[Guess, Face]):" in (tmp_path / "rock_paper.py").read_text()
    output = capsys.readouterr().out
    for word in ("play", "serve", "pytest test_", "validate", "train --env", "build"):
        assert f"{word}" in output
    assert main(["init", "rock-paper"]) == 2
    assert "rock_paper.py yet, it is there" in capsys.readouterr().err
    # A task is made from the schema of the file as it is now.
    file = tmp_path / "rock_paper.py"
    file.write_text(file.read_text().replace("number: int", "number: int\n    loud: bool = False"))
    assert main(["init", "rock-paper", "--task"]) == 0
    assert set(entries(tmp_path)) >= {"rock_paper.yaml", "rock_paper_task.py"}
    text = (tmp_path / "rock_paper_task.py").read_text()
    assert "from rock_paper import Face, Guess\n" in text
    assert '"number": {"type": "integer"}, "loud": {"default": false, "type": "boolean"}' in text
    assert 'f"hint: {observation.hint}"' in text
    assert main(["init", "random"]) == 2
    assert "Python's own library" in capsys.readouterr().err
    del sys.modules["rock_paper"]


@pytest.mark.soak
@pytest.mark.interop
def test_the_released_packages_validator_reads_the_manifest(made: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from openenv.validation.parsers.openenv_yaml import OpenEnvYamlParser\n"
        "found = OpenEnvYamlParser().parse(Path(sys.argv[1]))\n"
        "print(found.name, found.reward.range, found.network.mode)"
    )
    command = [str(released.python("0.10.0")), "-c", code, str(made)]
    done = finished(*command, env=released.environment(), timeout_s=released.WAIT_TIMEOUT_S)
    assert done.stdout.split("\n")[0] == "rock_paper_env (0.0, 1.0) no-network", done.stderr


def test_all_ways_to_write_a_name_are_one_name() -> None:
    for text in ("rock_paper", "rock-paper", "rock_paper_env", "rock-paper-env"):
        names = names_of(text)
        assert (names.package, names.image) == ("rock_paper_env", "rock-paper-env")
        assert (names.prefix, names.title) == ("RockPaper", "Rock Paper")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "lower-case letters"),
        ("env", "before the suffix _env"),
        ("Dice", "try 'dice'"),
        ("RockPaper", "try 'rock_paper'"),
        ("../rock", "try 'rock'"),
        ("2048", "try 'game_2048'"),
        ("übung", "lower-case letters"),
        ("x" * (LONGEST + 1), f"at most {LONGEST}"),
        ("class", "keyword"),
        ("base", "base image"),
        ("openenv", "released package"),
        ("call_tool", "CallToolAction"),
        ("blackjack", "envs.blackjack_env"),
    ],
)
def test_invalid_names_are_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^expected .*, got .*; (try|choose) ") as refused:
        names_of(text)
    assert says in str(refused.value)
    _, suggested, name = str(refused.value).rpartition("; try ")
    assert not suggested or names_of(name.strip("'"))


def test_name_that_an_installed_package_has_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("site/taken_env", "there_env"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "site" / "taken_env" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    with pytest.raises(ConfigurationError, match="there is a package taken_env at"):
        names_of("taken")
    # A folder in the working directory is none.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    assert names_of("there").package == "there_env"
