"""The released package's import paths, as names of ours."""

import importlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

import openenv_core
from openenv_core import ConfigurationError, compat
from openenv_core.compat.hook import AliasModule, Names, resolve
from openenv_core.compat.names import FORMER_ROOTS, MODULES, module_for
from servers.target import SERVER_NAMES

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs" / "compatibility.md"


@pytest.fixture(autouse=True)
def _no_hook() -> Iterator[None]:
    compat.uninstall()
    yield
    compat.uninstall()


@pytest.fixture
def hook() -> None:
    compat.install(SERVER_NAMES)


def provided() -> list[tuple[str, str]]:
    names = Names(SERVER_NAMES)
    return [(module, name) for module in MODULES for name in sorted(set(names.available(module)))]


def not_provided() -> list[tuple[str, str]]:
    names = Names(SERVER_NAMES)
    return [
        (module, name)
        for module, entry in MODULES.items()
        for name in entry.later
        if names.target(module, name) is None
    ]


@pytest.mark.usefixtures("hook")
def test_every_name_of_the_table_is_there() -> None:
    for module, name in provided():
        alias = importlib.import_module(module)
        target = Names(SERVER_NAMES).target(module, name)
        assert target is not None, (module, name)
        assert getattr(alias, name) is resolve(target), (module, name)
        assert name in dir(alias), module


@pytest.mark.usefixtures("hook")
def test_a_name_that_is_not_built_yet_says_so() -> None:
    for module, name in not_provided():
        with pytest.raises(
            ImportError, match=rf"got {name}, which it does not: .*docs/compatibility\.md"
        ) as caught:
            exec(f"from {module} import {name}", {})
        assert isinstance(caught.value, compat.NotProvided), (module, name)


@pytest.mark.usefixtures("hook")
def test_a_module_that_is_not_built_at_all_says_so_of_any_name() -> None:
    with pytest.raises(compat.NotProvided, match=r"openenv\.core\.harness, got Anything"):
        exec("from openenv.core.harness import Anything", {})
    with pytest.raises(ModuleNotFoundError, match=r"openenv\.no_such_module"):
        importlib.import_module("openenv.no_such_module")


@pytest.mark.usefixtures("hook")
def test_a_name_that_nobody_has_is_no_name() -> None:
    module = importlib.import_module("openenv.core.env_server")
    assert not hasattr(module, "NoSuchName")
    with pytest.raises(ImportError, match="NoSuchName"):
        exec("from openenv.core.env_server import NoSuchName", {})


@pytest.mark.usefixtures("hook")
def test_every_way_to_write_an_import() -> None:
    scope: dict[str, object] = {}
    exec("from openenv.core.env_server import *", scope)
    assert scope["Environment"] is openenv_core.Environment
    assert scope["create_app"] is resolve("servers:create_app")
    exec("import openenv.core.env_server.types as types; import openenv", scope)
    assert scope["types"].Action is openenv_core.Action  # type: ignore[attr-defined]
    assert scope["openenv"].core.env_server.types is scope["types"]  # type: ignore[attr-defined]
    exec("from openenv.core import env_server, EnvClient", scope)
    assert isinstance(scope["env_server"], AliasModule)
    assert scope["EnvClient"] is openenv_core.EnvClient


@pytest.mark.usefixtures("hook")
def test_the_paths_of_the_first_releases_are_there_beside_our_own() -> None:
    scope: dict[str, object] = {}
    exec("from openenv_core.env_server.types import Action", scope)
    exec("from openenv_core.env_server import Environment, create_app", scope)
    exec("from openenv_core.client_types import StepResult", scope)
    exec("from openenv_core.env_client import EnvClient", scope)
    assert scope["Action"] is openenv_core.Action
    assert scope["Environment"] is openenv_core.Environment
    assert scope["StepResult"] is openenv_core.StepResult
    assert scope["EnvClient"] is openenv_core.EnvClient


@pytest.mark.usefixtures("hook")
def test_a_model_can_hold_messages() -> None:
    scope: dict[str, object] = {}
    exec("from openenv.core.env_server.interfaces import Action, Message", scope)
    exec("class Chat(Action):\n    messages: list[Message]", scope)
    exec("chat = Chat(messages=[{'role': 'user', 'content': 'hi'}])", scope)
    assert scope["chat"].messages == [{"role": "user", "content": "hi"}]  # type: ignore[attr-defined]


def test_no_module_of_ours_is_hidden() -> None:
    ours = {path.stem for path in (ROOT / "openenv_core").iterdir()}
    assert not ours & set(FORMER_ROOTS)
    assert module_for("openenv_core.types") is None
    assert module_for("openenv_core") is None
    assert module_for("openenvironment") is None


def test_without_install_nothing_is_supplied_and_uninstall_takes_it_away() -> None:
    assert compat.installed() is None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("openenv.core")
    hook = compat.install()
    assert compat.install() is hook
    importlib.import_module("openenv_core.env_server.types")
    importlib.import_module("openenv.core")
    compat.uninstall()
    assert compat.installed() is None
    assert not [name for name in sys.modules if name == "openenv" or name.startswith("openenv.")]
    assert not hasattr(openenv_core, "env_server")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("openenv.core")


def test_the_servers_part_comes_from_the_server() -> None:
    compat.install()
    with pytest.raises(compat.NotProvided, match="ropewalk serve"):
        exec("from openenv.core.env_server.http_server import create_app", {})
    compat.install(SERVER_NAMES)
    scope: dict[str, object] = {}
    exec("from openenv.core.env_server.http_server import create_app", scope)
    assert scope["create_app"] is resolve("servers:create_app")


@pytest.mark.parametrize(
    ("files", "text"),
    [
        (
            {"openenv-0.10.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: openenv\nVersion: 0.10.0\n"},
            r"got openenv 0\.10\.0 in the same environment",
        ),
        (
            {
                "openenv_core-0.2.3.dist-info/METADATA": "Metadata-Version: 2.1\nName: openenv-core\nVersion: 0.2.3\n"
            },
            r"got openenv-core 0\.2\.3",
        ),
        ({"openenv/__init__.py": ""}, "got a package 'openenv' at .*openenv"),
    ],
)
def test_beside_the_released_package_it_refuses(
    files: dict[str, str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigurationError, match=text) as caught:
        compat.install()
    assert "pip uninstall" in str(caught.value)
    assert compat.installed() is None


def test_a_mere_folder_of_that_name_is_not_the_released_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "openenv").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    compat.install()
    assert isinstance(importlib.import_module("openenv"), AliasModule)
    assert find_spec("openenv.core") is not None


def test_it_is_light() -> None:
    program = (
        "import sys; import openenv_core; before = set(sys.modules)\n"
        "from openenv_core import compat; compat.install()\n"
        "import openenv.core.env_server.http_server, openenv.core.env_client\n"
        "print(*(set(sys.modules) - before))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert not loaded & {"fastapi", "starlette", "servers", "websockets", "picows", "httpx"}


@pytest.mark.parametrize(
    "program",
    [
        "from servers.target import load_app; load_app('blackjack')",
        "import sys; from openenv_core.cli.main import main; sys.exit(main(['serve', 'blackjack']))",
    ],
)
def test_a_wheel_that_has_overwritten_our_package_is_named(program: str, tmp_path: Path) -> None:
    """The released wheel brings a package of our name; installed after ours, its __init__ replaces ours."""
    shutil.copytree(ROOT / "openenv_core", tmp_path / "openenv_core")
    shutil.copytree(ROOT / "servers", tmp_path / "servers")
    (tmp_path / "openenv_core" / "__init__.py").write_text(
        "def __getattr__(name):\n    raise AttributeError(name)\n"
    )
    (tmp_path / "openenv").mkdir()
    (tmp_path / "openenv" / "__init__.py").write_text("")
    (tmp_path / "ropewalk-0.1.0.dist-info").mkdir()
    (tmp_path / "ropewalk-0.1.0.dist-info" / "METADATA").write_text("Name: ropewalk\nVersion: 0.1.0\n")
    entry = "[ropewalk.commands]\nserve = servers.app:create_app\n"
    (tmp_path / "ropewalk-0.1.0.dist-info" / "entry_points.txt").write_text(entry)
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode
    assert "expected Ropewalk without the released OpenEnv package" in done.stderr.splitlines()[-1]


def test_the_table_in_the_docs_is_the_table() -> None:
    names = Names(SERVER_NAMES)
    written = {
        (match["module"], name)
        for match in re.finditer(
            r"^\| `(?P<module>openenv[\w.]*)` \| (?P<names>[^|]*) \|", DOCS.read_text(), re.M
        )
        for name in re.findall(r"`(\w+)`", match["names"])
    }
    direct = {
        (module, name)
        for module, entry in MODULES.items()
        for name in (*entry.names, *names.extra.get(module, ()))
    }
    assert written == direct
