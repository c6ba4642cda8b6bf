"""The released package's import paths, mapped to ours."""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
from compat_hook import installed_hook, uninstall_hook
from counter import Add, Count, Counter, CountState
from fastapi import FastAPI
from serving import ask, request, serving, socket_to

import openenv_core
from openenv_core import ConfigurationError, compat
from openenv_core.compat.containers import ContainerProvider, LocalDockerProvider
from openenv_core.compat.hook import Hook
from openenv_core.compat.judge import LLMJudge as ReleasedJudge
from openenv_core.compat.mcp_client import MCPToolClient as ReleasedToolClient
from openenv_core.compat.names import FORMER_ROOTS, MODULES, UNPROVIDED, module_for
from openenv_core.compat.types import (
    ServerMode,
    StepResponse,
    WSErrorCode,
    WSErrorResponse,
    serialize_observation,
)
from openenv_core.llm_client import LLMClient
from openenv_core.protocol import errors as codes
from openenv_core.protocol.frames import encode_observation
from servers.released import NAMES as SERVER_NAMES
from servers.released import HTTPEnvServer

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs" / "compatibility.md"


@pytest.fixture(autouse=True)
def _no_hook() -> Iterator[None]:
    uninstall_hook()
    yield
    uninstall_hook()


@pytest.fixture
def hook() -> None:
    compat.install()


@pytest.mark.usefixtures("hook")
def test_every_name_of_the_table_resolves() -> None:
    names = Hook()
    for module in MODULES:
        for name in names.available(module):
            alias, target = importlib.import_module(module), names.target(module, name)
            assert target is not None, (module, name)
            assert getattr(alias, name) is resolve_name(target), (module, name)
            assert name in dir(alias), module


@pytest.mark.usefixtures("hook")
def test_missing_name_is_reported_as_not_provided() -> None:
    names = Hook()
    for module, name in (*UNPROVIDED, ("openenv.core.http_env_client", "HTTPEnvClient")):
        if names.target(module, name) is None:
            with pytest.raises(compat.NotProvidedError, match=rf"got {name}, .*docs/compatibility\.md"):
                exec(f"from {module} import {name}", {})
    with pytest.raises(compat.NotProvidedError, match=r"openenv\.core\.harness, got Anything"):
        exec("from openenv.core.harness import Anything", {})
    with pytest.raises(ModuleNotFoundError, match=r"openenv\.no_such_module"):
        importlib.import_module("openenv.no_such_module")
    with pytest.raises(ImportError, match="NoSuchName"):
        exec("from openenv.core.env_server import NoSuchName", {})
    assert not hasattr(importlib.import_module("openenv.core.env_server"), "NoSuchName")


@pytest.mark.usefixtures("hook")
def test_every_import_form_works() -> None:
    scope: dict[str, Any] = {}
    exec("from openenv.core.env_server import *", scope)
    assert scope["Environment"] is openenv_core.Environment
    assert scope["create_app"] is resolve_name("servers:create_app")
    exec("import openenv.core.env_server.types as types; import openenv", scope)
    assert scope["types"].Action is openenv_core.Action
    assert scope["openenv"].core.env_server.types is scope["types"]
    exec("from openenv.core import env_server, EnvClient", scope)
    assert isinstance(scope["env_server"].__loader__, Hook)
    assert scope["EnvClient"] is openenv_core.EnvClient
    # The paths of the first releases, beside our own.
    exec("from openenv_core.env_server.types import Action", scope)
    exec("from openenv_core.client_types import StepResult", scope)
    assert scope["Action"] is openenv_core.Action
    assert scope["StepResult"] is openenv_core.StepResult
    exec("from openenv.core.env_server.interfaces import Action, Message", scope)
    exec("class Chat(Action):\n    messages: list[Message]", scope)
    message = {"role": "user", "content": "hi"}
    assert scope["Chat"](messages=[message]).messages == [message]


@pytest.mark.usefixtures("hook")
def test_version_is_that_of_the_release_whose_names_are_provided() -> None:
    assert importlib.import_module("openenv").__version__ == "0.10.0"
    assert openenv_core.__version__ != "0.10.0"  # which is our own


def test_released_tool_client_has_one_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENENV_CLIENT_MODE", "simulation")  # which the released client does not read
    sent: list[str] = []

    class Recorder(ReleasedToolClient):
        async def step(self, action: object) -> Any:
            raise AssertionError("a call was sent as a step")

        async def _call_rpc(self, method: str, params: object) -> Any:
            sent.append(method)
            return {"content": [], "structured_content": {"result": 1}, "data": 1, "is_error": False}

    for mode in (None, "production", "PRODUCTION"):
        client = Recorder("http://localhost:1", mode=mode).sync()
        client.call_tool("add", amount=1)
        client.close()
    assert len(sent) == 3
    for mode in ("simulation", "mcp"):
        with pytest.raises(ValueError, match=r"production.*for MCPToolClient"):
            ReleasedToolClient("http://localhost:1", mode=mode)
    assert issubclass(ReleasedToolClient, openenv_core.MCPToolClient)


async def test_released_judge_takes_the_first_number() -> None:
    class Model(LLMClient):
        async def complete(self, prompt: str, **options: object) -> str:
            return prompt  # sent as it is: no format is asked for

    model = Model("http://localhost", 1)
    for prompt, score in (("0.7 of 1", 0.7), ("8 of 10", 1.0), ("none", 0.0)):
        assert await ReleasedJudge(prompt, model)(0, 0) == score  # type: ignore[misc]
    assert await ReleasedJudge("none", model, default_score=0.5)(0, 0) == 0.5  # type: ignore[misc]


def test_constructor_documents_the_mode() -> None:
    text = openenv_core.GenericEnvClient.__init__.__doc__ or ""
    assert {"mode", '"simulation"', '"production"'} <= {word.strip(",.") for word in text.split()}


def test_names_exist_only_between_install_and_uninstall_and_hide_no_module_of_ours() -> None:
    assert not {path.stem for path in (ROOT / "openenv_core").iterdir()} & set(FORMER_ROOTS)
    for name in ("openenv_core.types", "openenv_core", "openenvironment"):
        assert module_for(name) is None
    assert installed_hook() is None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("openenv.core")
    hook = compat.install()
    assert compat.install() is hook
    importlib.import_module("openenv_core.env_server.types")
    importlib.import_module("openenv.core")
    uninstall_hook()
    assert installed_hook() is None
    assert not [name for name in sys.modules if name == "openenv" or name.startswith("openenv.")]
    assert not hasattr(openenv_core, "env_server")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("openenv.core")


@pytest.mark.slow
def test_compat_command_provides_the_names_in_all_child_processes(tmp_path: Path) -> None:
    (tmp_path / "envs" / "elsewhere_env").mkdir(parents=True)
    for folder in (tmp_path / "envs", tmp_path / "envs" / "elsewhere_env"):
        (folder / "__init__.py").touch()
    (tmp_path / "sitecustomize.py").write_text("print('mine')")
    inner = (
        "import sys; light = 'openenv_core' not in sys.modules; import envs.elsewhere_env, envs.blackjack_env;"
        " from openenv.core.env_server.http_server import create_app; from openenv_core.env_server.types import Action;"
        " print(light, create_app.__module__, Action.__module__)"
    )
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}], check=True)"
    done = subprocess.run(
        [sys.executable, "-m", "openenv_core.compat", "python", "-c", outer],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)]),
            "PYTHONUNBUFFERED": "1",  # else what is printed before an exec is lost
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [*["mine"] * 3, "True", "servers.app", "openenv_core.types"]


RELEASED = {
    "openenv-0.10.0.dist-info/METADATA": (
        "Metadata-Version: 2.1\nName: openenv\nVersion: 0.10.0\n",
        r"got openenv 0\.10\.0 in the same environment",
    ),
    "openenv_core-0.2.3.dist-info/METADATA": (
        "Metadata-Version: 2.1\nName: openenv-core\nVersion: 0.2.3\n",
        r"got openenv-core 0\.2\.3",
    ),
    "openenv/__init__.py": ("", "got a package 'openenv' at .*openenv"),
}


@pytest.mark.parametrize("name", RELEASED)
def test_install_refuses_beside_the_released_package(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, text = RELEASED[name]
    (tmp_path / name).parent.mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    if name.startswith("openenv/"):  # a mere folder of that name is no package
        compat.install()
        assert isinstance(importlib.import_module("openenv").__loader__, Hook)
        assert find_spec("openenv.core") is not None
        uninstall_hook()
        importlib.invalidate_caches()
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigurationError, match=text) as caught:
        compat.install()
    assert "pip uninstall" in str(caught.value)
    assert installed_hook() is None


@pytest.mark.slow
def test_released_wheel_over_our_package_is_reported(tmp_path: Path) -> None:
    """The released wheel brings a package of our name; installed after ours, its __init__ replaces ours."""
    for package in ("openenv_core", "servers"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    entry = "[ropewalk.commands]\nserve = servers.app:create_app\n"
    for name, content in {
        "openenv_core/__init__.py": "def __getattr__(name):\n    raise AttributeError(name)\n",
        "openenv/__init__.py": "",
        "ropewalk-0.1.0.dist-info/METADATA": "Name: ropewalk\nVersion: 0.1.0\n",
        "ropewalk-0.1.0.dist-info/entry_points.txt": entry,
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    for program in (
        "from servers.target import load_app; load_app('blackjack')",
        "import sys; from openenv_core.cli.main import main; sys.exit(main(['serve', 'blackjack']))",
    ):
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


def test_documented_table_matches_the_code() -> None:
    names = {module: {*targets, *SERVER_NAMES.get(module, ())} for module, targets in MODULES.items()}
    written = {
        (match["module"], name)
        for match in re.finditer(
            r"^\| `(?P<module>openenv[\w.]*)` \| (?P<names>[^|]*) \|", DOCS.read_text(), re.M
        )
        for name in re.findall(r"`(\w+)`", match["names"])
    }
    direct = {(module, name) for module in names for name in names[module]}
    assert written == direct


async def test_released_server_class_serves_inside_an_application() -> None:
    app = FastAPI()

    @app.get("/mine")
    async def mine() -> str:
        return "mine"

    server = HTTPEnvServer(Counter, Add, Count, 2, None, "tally", CountState, reset_observation_cls=Count)
    server.register_routes(app, mode=ServerMode.SIMULATION)
    async with serving(app) as address:
        assert (await request(address, "GET", "/mine")).json() == "mine"
        assert (await request(address, "POST", "/reset", {})).status_code == 200
        strange = await request(address, "POST", "/reset", {}, {"Host": "evil.example"})
        assert strange.status_code == 421  # the guard stands before it
        assert (await request(address, "GET", "/metadata")).json()["name"] == "tally"
        assert (await request(address, "GET", "/schema")).json()["state"]["title"] == "CountState"
        async with socket_to(address) as ws:
            assert (await ask(ws, {"type": "reset", "data": {}}))["type"] == "observation"
    with pytest.raises(TypeError, match="an instance of Counter"):
        HTTPEnvServer(Counter(), Add, Count)  # type: ignore[arg-type]


def test_released_wire_models_match_the_wire() -> None:
    observation = Count(total=3, reward=1.0, metadata={"a": 1})
    serialized = serialize_observation(observation)
    assert json.loads(encode_observation(observation))["data"] == serialized
    assert StepResponse(**serialized).observation == serialized["observation"]
    assert {code.value for code in WSErrorCode} == {
        value for name, value in vars(codes).items() if name.isupper() and isinstance(value, str)
    } - {codes.NOT_EXECUTED}  # which is told to clients alone that speak `ropewalk.v1`
    assert (
        WSErrorResponse(data={"code": WSErrorCode.SESSION_ERROR}).model_dump()["data"]["code"]
        == "SESSION_ERROR"
    )


def test_released_provider_is_a_context_manager() -> None:
    closed: list[str] = []

    class Hosted(ContainerProvider):
        def start_container(self, *args: Any, **options: Any) -> str:
            return "http://h"

        def wait_for_ready(self, base_url: str, timeout_s: float = 30.0) -> None: ...

        def stop_container(self) -> None: ...

        def close(self) -> None:
            closed.append("closed")

    with Hosted() as provider:
        assert closed == []
    assert closed == ["closed"]
    with LocalDockerProvider() as local:
        assert isinstance(local, ContainerProvider)
    assert isinstance(provider, ContainerProvider)
