"""What `ropewalk serve` can serve, and its errors for everything else."""

import importlib
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

import pytest
from compat_hook import uninstall_hook

from openenv_core import ConfigurationError
from openenv_core.targets import Target, TargetKind, target_of, variables_for
from servers.environments import source_of
from servers.target import is_asgi, load_app

ROOT = Path(__file__).parents[2]

ASGI = "async def app(scope, receive, send): ...\nthe_other = app\nnumber = 3\n"

# An environment as it stands in a folder written for the released package; the released scaffold itself is
# served in tests/interop.
ENVIRONMENT = """
from openenv.core.env_server.interfaces import Environment
try:
    from ..models import Move, Seen
except ImportError:
    from models import Move, Seen

class Walk(Environment):
    def reset(self, seed=None, episode_id=None, **kwargs):
        return Seen(at=0)

    def step(self, action, timeout_s=None, **kwargs):
        return Seen(at=action.by)

    @property
    def state(self):
        return None
"""
MODELS = """
from openenv.core.env_server.types import Action, Observation

class Move(Action):
    by: int

class Seen(Observation):
    at: int
"""
APP = """
from openenv.core.env_server.http_server import create_app
try:
    from ..models import Move, Seen
    from .walk_environment import Walk
except ImportError:
    from models import Move, Seen
    from server.walk_environment import Walk

app = create_app(Walk, Move, Seen, env_name="walk", max_concurrent_envs=1)
"""


@pytest.fixture(autouse=True)
def _restore_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo the effects of loading on this process."""
    modules, path = set(sys.modules), list(sys.path)
    monkeypatch.chdir(tmp_path)
    yield
    uninstall_hook()
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        module = sys.modules[name]
        location = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), None)
        if location is not None and Path(location).is_relative_to(tmp_path):
            del sys.modules[name]


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    importlib.invalidate_caches()
    return root


def folder(root: Path, package: bool = True) -> Path:
    files = {
        "server/__init__.py": "",
        "server/walk_environment.py": ENVIRONMENT,
        "server/app.py": APP,
        "models.py": MODELS,
    }
    return write(root, {**files, "__init__.py": "from .models import Move\n"} if package else files)


@pytest.mark.parametrize("name", ["blackjack", "blackjack_env", "Blackjack", "blackjack-env"])
def test_environment_of_this_tree_is_found_by_name(name: str) -> None:
    assert load_app(name) is importlib.import_module("envs.blackjack_env.server.app").app


def test_installed_environment_is_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder(tmp_path / "site" / "walk_env")
    monkeypatch.syspath_prepend(tmp_path / "site")
    for name in ("walk", "walk_env"):
        assert load_app(name) is sys.modules["walk_env.server.app"].app


def test_editable_install_is_the_same_environment_to_every_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = folder(tmp_path / "checkout" / "walk_env")
    (tmp_path / "elsewhere" / "walk").mkdir(parents=True)  # a folder of the name that is no environment
    monkeypatch.chdir(tmp_path / "elsewhere")

    class Finder:
        """An editable install of pip: not on sys.path, but with its own finder."""

        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
            return PathFinder.find_spec(name, [str(source.parent)]) if name == "walk_env" else None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    assert target_of("walk") == Target(TargetKind.NAME, "walk", source)
    assert source_of("walk") == source
    assert load_app("walk") is sys.modules["walk_env.server.app"].app


def test_folder_named_like_an_environment_takes_precedence_in_every_command(tmp_path: Path) -> None:
    write(tmp_path, {"blackjack/server/__init__.py": "", "blackjack/server/app.py": ASGI})
    here = tmp_path / "blackjack"
    assert target_of("blackjack") == Target(TargetKind.PATH, str(here), here)
    assert source_of("blackjack") == here
    assert load_app("blackjack").__module__ == "server.app"


@pytest.mark.parametrize(
    "target", ["walking:app", "walking:the_other", "walking.py", "./walking.py", "walking.py:the_other"]
)
def test_app_in_a_module_or_file(target: str, tmp_path: Path) -> None:
    write(tmp_path, {"walking.py": ASGI})
    assert load_app(target) is sys.modules["walking"].app


@pytest.mark.parametrize(
    "target", ["walk_env", "./walk_env", "walk_env/openenv.yaml", "walk_env/server/app.py", "ABSOLUTE"]
)
def test_folder_that_is_a_package(target: str, tmp_path: Path) -> None:
    folder(tmp_path / "walk_env")
    (tmp_path / "walk_env" / "openenv.yaml").write_text(
        "spec_version: 1\nname: walk\napp: server.app:app\nport: 8000\n"
    )
    app = load_app(target.replace("ABSOLUTE", str(tmp_path / "walk_env")))
    assert app is sys.modules["walk_env.server.app"].app
    assert "models" not in sys.modules


def test_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder(tmp_path / "walk_env"))
    assert load_app(".") is sys.modules["walk_env.server.app"].app


@pytest.mark.parametrize("target", ["./walk-env", "walk-env/server/app.py"])
def test_clone_with_a_hyphenated_folder_name(target: str, tmp_path: Path) -> None:
    strict = APP.replace("try:", "if True:").partition("except ImportError:")
    folder(tmp_path / "walk-env")
    write(tmp_path / "walk-env", {"server/app.py": strict[0] + strict[2].partition("Walk\n")[2]})
    assert load_app(target) is sys.modules["walk_env.server.app"].app


@pytest.mark.parametrize("name", ["walk-env", "walk_env"])
def test_folder_that_is_not_a_package(name: str, tmp_path: Path) -> None:
    folder(tmp_path / name, package=False)
    assert load_app(f"./{name}") is sys.modules["server.app"].app
    assert Path(sys.modules["models"].__file__ or "").parent == tmp_path / name


@pytest.mark.parametrize(
    "line",
    [
        "app: main:the_other",
        'app: "main:the_other"',
        "app: walk_env.main:the_other",
        "app: envs.walk_env.main:the_other",
    ],
)
def test_manifest_names_the_app(line: str, tmp_path: Path) -> None:
    write(
        tmp_path / "walk_env",
        {"__init__.py": "", "main.py": ASGI, "openenv.yaml": f"name: walk\n{line}\nport: 1\n"},
    )
    assert load_app("./walk_env") is sys.modules["walk_env.main"].the_other


def test_same_folder_loads_twice_but_not_another_of_its_name(tmp_path: Path) -> None:
    folder(tmp_path / "walk_env")
    folder(tmp_path / "other" / "walk_env")
    assert load_app("walk_env") is load_app("./walk_env")
    with pytest.raises(ConfigurationError, match="rename the folder"):
        load_app("other/walk_env")


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("", r"expected the name of an environment, got ''"),
        ("blackjak", r"got 'blackjak'; did you mean 'blackjack'\?"),
        ("xyzzy", r"there are: .*blackjack.* Give FILE.py, module:attribute, a folder"),
        ("nowhere:app", r'expected an app at .* Could not import module "nowhere"'),
        ("walking.nowhere:app", r'Could not import module "walking.nowhere"'),
        ("walking:ap", r'Attribute "ap" not found in module "walking"; did you mean .app.\?'),
        ("walking:number", r"expected an ASGI app at 'walking:number', as create_app returns it, got int"),
        ("walking.py:app.deeper", r'Attribute "app.deeper" not found'),
        ("needy:app", r"got in \S*needy.py, line 2: No module named 'no_such_package'; install"),
        ("playing:app", r"No module named 'gymnasium'; pip install 'ropewalk\[gymnasium\]'"),
        ("later:app", r"got HTTPEnvClient, which it does not: it belongs to release 0.1"),
        ("tried:app", r"tried.py, line 2: .*got HTTPEnvClient, which it does not: it belongs to release 0.1"),
        ("./nowhere", r"there is no folder or file at \./nowhere"),
        ("~nobody-of-this-name/x", r"there is no folder or file at ~nobody-of-this-name/x"),
        ("nowhere.py", r"no folder or file at nowhere.py"),
        (
            "./empty",
            r"expected an environment in the folder \./empty, got neither openenv.yaml nor server/app.py",
        ),
        ("./odd", r"expected `app: module:attribute` in .*odd.openenv.yaml, got \[1\]"),
        ("./json", r"expected to import json from .*json.__init__.py; rename the folder"),
        ("text.txt", r"expected a Python file whose name can be imported, got text.txt"),
        ("a b:app", r"expected module:attribute, got 'a b:app'"),
    ],
)
def test_unusable_target_is_reported(target: str, text: str, tmp_path: Path) -> None:
    importlib.import_module("json")
    write(
        tmp_path,
        {
            "walking.py": ASGI,
            "needy.py": "import json\nimport no_such_package\n",
            "playing.py": "raise ModuleNotFoundError(\"No module named 'gymnasium'\", name='gymnasium')\n",
            "later.py": "from openenv.core.http_env_client import HTTPEnvClient\n",
            "tried.py": "try:\n    from openenv.core.http_env_client import HTTPEnvClient\n"
            "except ImportError:\n    import fallback\n",
            "empty/readme.md": "",
            "odd/openenv.yaml": "app: [1]\n",
            "json/__init__.py": "",
            "json/server/app.py": ASGI,
            "text.txt": "",
        },
    )
    with pytest.raises(ConfigurationError, match=text):
        load_app(target)


@pytest.mark.parametrize("target", ["broken:app", "broken.py", "./broken_env"])
def test_exception_of_the_author_propagates(target: str, tmp_path: Path) -> None:
    source = "raise ZeroDivisionError('of the author')\n"
    write(tmp_path, {"broken.py": source, "broken_env/__init__.py": source, "broken_env/server/app.py": ""})
    with pytest.raises(ZeroDivisionError, match="of the author"):
        load_app(target)


def test_asgi_apps_are_recognised() -> None:
    class Async:
        async def __call__(self, scope: object, receive: object, send: object) -> None: ...

    class Plain:
        def __call__(self, scope: object, receive: object, send: object) -> None: ...

    async def short(scope: object) -> None: ...

    assert is_asgi(Async())
    assert is_asgi(Async().__call__)
    for value in (Async, Plain(), short, 3):
        assert not is_asgi(value), value


def test_argument_sets_the_first_variable_of_the_manifest(tmp_path: Path) -> None:
    assert variables_for("gymnasium", "FrozenLake-v1") == {"GYMNASIUM_ENV": "FrozenLake-v1"}
    assert variables_for("harbor", "tasks/") == {"HARBOR_TASKS": "tasks/"}
    assert variables_for(str(ROOT / "envs" / "harbor_env"), "x") == {"HARBOR_TASKS": "x"}
    (tmp_path / "openenv.yaml").write_text("name: plain\n")
    for text in ("blackjack", str(tmp_path)):
        with pytest.raises(ConfigurationError, match=r"lists no variables; leave 'x' out"):
            variables_for(text, "x")
