"""Released clients of Daytona's sandboxes and of Inspect AI's evaluations, with stand-ins for their SDKs."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from compat_hook import uninstall_hook

from openenv_core import ConfigurationError, compat
from openenv_core.compat.daytona import DaytonaProvider
from openenv_core.compat.evals import EvalConfig, EvalResult, InspectAIHarness


class Machine:
    """A sandbox: what is run in it, and what that prints."""

    def __init__(self, params: Any) -> None:
        self.params, self.ran, self.deleted, self.busy = params, list[str](), False, False
        self.prints: dict[str, str] = {}
        self.process = self

    def exec(self, command: str, timeout: float) -> Any:
        self.ran.append(command)
        return SimpleNamespace(
            result=next((output for part, output in self.prints.items() if part in command), "")
        )

    def create_signed_preview_url(self, port: int, expires_in_seconds: int) -> Any:
        return SimpleNamespace(url=f"http://127.0.0.1:9/{port}")


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Machine]]:
    """Install a stand-in for the SDK, whose sandboxes print what is given; return those that are made."""

    def install(**prints: str) -> list[Machine]:
        created: list[Machine] = []

        class Daytona:
            def __init__(self, config: Any) -> None:
                self.config = config

            def create(self, params: Any, timeout: float) -> Machine:
                created.append(Machine(params))
                created[-1].prints = prints
                return created[-1]

            def delete(self, machine: Machine) -> None:
                if machine.busy:
                    raise OSError("the service is busy")
                machine.deleted = True

        sdk = ModuleType("daytona")
        vars(sdk).update(
            Daytona=Daytona,
            DaytonaConfig=SimpleNamespace,
            CreateSandboxFromImageParams=SimpleNamespace,
            CreateSandboxFromSnapshotParams=SimpleNamespace,
            Image=SimpleNamespace(from_dockerfile=lambda path: Path(path).read_text()),
        )
        monkeypatch.setitem(sys.modules, "daytona", sdk)
        return created

    return install


def test_sandbox_serves_the_app_of_its_manifest_and_is_deleted(machines: Any) -> None:
    created = machines(
        **{"test -f": "found", "cat /app": "app: server.app:app\n", "kill -0": "DEAD", "log": "no app"}
    )
    provider = DaytonaProvider(api_key="k", public=True)
    assert provider.start_container("echo:latest", env_vars={"A": "1"}) == "http://127.0.0.1:9/8000"
    (machine,) = created
    assert machine.params == SimpleNamespace(image="echo:latest", public=True, env_vars={"A": "1"})
    assert "cd /app/env && python -m uvicorn server.app:app" in machine.ran[-1]
    with pytest.raises(RuntimeError, match=r"process died; its log:\nno app"):
        provider.wait_for_ready("http://127.0.0.1:9", timeout_s=30)
    with pytest.raises(ConfigurationError, match=r"call stop_container\(\) first"):
        provider.start_container("echo:latest")
    machine.busy = True
    with pytest.raises(OSError, match="busy"):
        provider.stop_container()
    machine.busy = False
    provider.stop_container()
    provider.stop_container()
    assert (machine.deleted, len(created)) == (True, 1)
    created = machines()
    with pytest.raises(ConfigurationError, match=r"Could not find openenv\.yaml"):
        DaytonaProvider().start_container("snapshot:mine")
    assert (created[0].params.snapshot, created[0].deleted) == ("mine", True)
    with pytest.raises(ConfigurationError, match="only supports port 8000"):
        DaytonaProvider().start_container("echo", port=1)


def test_dockerfile_is_built_without_its_mounts_and_its_command_serves(machines: Any, tmp_path: Path) -> None:
    created = machines()
    (tmp_path / "server").mkdir()
    file = tmp_path / "server" / "Dockerfile"
    file.write_text(
        "FROM python\nCOPY . /app\nRUN --mount=type=cache,target=/c \\\n    --mount=type=bind,target=/b pip x\n"
        'RUN a --mount=of-a\nCMD ["serve", "a b"]\n'
    )
    DaytonaProvider().start_container(DaytonaProvider.image_from_dockerfile(str(file)))
    assert created[0].params.image.splitlines()[2:4] == ["RUN pip x", "RUN a --mount=of-a"]
    assert "serve '\"'\"'a b'\"'\"'" in created[0].ran[-1]
    assert list(tmp_path.iterdir()) == [tmp_path / "server"]
    file.write_text("FROM python\nCOPY nothing /app\n")
    with pytest.raises(ConfigurationError, match="COPY source 'nothing' was not found"):
        DaytonaProvider.image_from_dockerfile(str(file))


def test_evaluation_is_delegated_and_its_metrics_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    log = SimpleNamespace(status="success", results=None)

    def evaluate(task: str, **options: Any) -> list[Any]:
        calls.append((task, options))
        return [log]

    sdk = ModuleType("inspect_ai")
    vars(sdk)["eval"] = evaluate
    monkeypatch.setitem(sys.modules, "inspect_ai", sdk)
    parameters = {"model": "m", "epochs": 0, "task_args": {}, "solver": None, "other": 1}
    config = EvalConfig(
        harness_name="h", harness_version="1", library_versions={}, dataset="d", eval_parameters=parameters
    )
    harness = InspectAIHarness(log_dir="logs")
    assert harness.run_from_config(config) == EvalResult(config=config, scores={})
    assert calls == [("d", {"model": "m", "epochs": 0, "log_dir": "logs"})]
    metrics = {"accuracy": SimpleNamespace(value=0.5)}
    log.results = SimpleNamespace(scores=[SimpleNamespace(metrics=metrics)])
    assert harness.run_from_config(config).scores == {"accuracy": 0.5}
    log.status = "error"
    with pytest.raises(RuntimeError, match="failed with status error"):
        harness.run_from_config(config)
    with pytest.raises(ValueError, match="has no 'model'"):
        harness.run("1", {}, "d", {})


def test_aliased_module_is_the_same_module() -> None:
    compat.install()
    try:
        from openenv.core import llm_client as released  # type: ignore[import-not-found]

        from openenv_core import llm_client

        assert released is llm_client
        assert sys.modules["openenv.core.llm_client"] is llm_client
    finally:
        uninstall_hook()
    assert "openenv.core.llm_client" not in sys.modules
    assert sys.modules["openenv_core.llm_client"] is llm_client
