"""Fakes of Daytona's and Modal's clients, whose sandboxes are processes of this machine.

Each function takes the parameters that the real one has, of those that ours gives, and no others: so a call that the
real client refuses is refused here. `SIGNATURES` says which is which, and a test looks them up in the clients.
"""

import os
import signal
import subprocess
from contextlib import suppress
from types import ModuleType, SimpleNamespace
from typing import Any, Final


class FakeMachine:
    """What a sandbox runs, and whether it is there."""

    def __init__(self, env: dict[str, str]) -> None:
        self.env, self.processes, self.renewed, self.there = env, list["subprocess.Popen[bytes]"](), 0, True

    def begin(self, *words: str) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen(words, env=self.env, stdout=subprocess.PIPE, start_new_session=True)
        self.processes.append(process)
        return process

    def end(self) -> None:
        self.there = False
        for each in self.processes:
            with suppress(ProcessLookupError):
                os.killpg(each.pid, signal.SIGKILL)
            each.wait()
            assert each.stdout is not None
            each.stdout.close()


class DaytonaError(Exception):
    def __init__(self, message: str, status_code: int | None = None) -> None:
        super().__init__(message)
        self.status_code = status_code


class DaytonaNotFoundError(DaytonaError): ...


class DaytonaTimeoutError(DaytonaError): ...


class DaytonaConnectionError(DaytonaError): ...


class DaytonaServiceUnavailableError(DaytonaError): ...


class DaytonaConfig:
    def __init__(self, *, api_key: str | None = None, api_url: str | None = None) -> None:
        self.api_key = api_key


class CreateSandboxFromImageParams:
    def __init__(
        self,
        *,
        image: str,
        env_vars: dict[str, str] | None = None,
        ephemeral: bool | None = None,
        auto_stop_interval: int | None = None,
        ttl_minutes: int | None = None,
    ) -> None:
        self.image, self.env_vars, self.ttl_minutes = image, env_vars or {}, ttl_minutes


class FakeProcess:
    def __init__(self, machine: FakeMachine) -> None:
        self._machine = machine

    def exec(self, command: str, cwd: Any = None, env: Any = None, timeout: int | None = None) -> Any:
        return SimpleNamespace(result=self._machine.begin("sh", "-c", command).communicate()[0].decode())


class DaytonaSandbox:
    def __init__(self, params: CreateSandboxFromImageParams) -> None:
        self.id, self.state = "daytona-1", "creating"
        self.params, self.machine = params, FakeMachine(params.env_vars)
        self.process = FakeProcess(self.machine)

    def create_signed_preview_url(self, port: int, expires_in_seconds: int | None = None) -> Any:
        return SimpleNamespace(url=f"http://127.0.0.1:{port}")

    def set_ttl(self, ttl_minutes: int, request_timeout: float | None = None) -> None:
        if not self.machine.there:
            raise DaytonaNotFoundError("no such sandbox", 404)
        assert ttl_minutes == self.params.ttl_minutes
        self.machine.renewed += 1

    def refresh_data(self, request_timeout: float | None = None) -> None:
        self.state = "started" if self.machine.there else "destroyed"

    def delete(self, timeout: float | None = 60, wait: bool = False) -> None:
        self.machine.end()


class Daytona:
    def __init__(self, config: DaytonaConfig | None = None) -> None:
        self.config = config

    def create(
        self, params: CreateSandboxFromImageParams | None = None, *, timeout: float = 60
    ) -> DaytonaSandbox:
        assert params is not None
        if params.image.startswith("no-such"):
            raise DaytonaNotFoundError("no such image", 404)
        if params.image.startswith("silent"):
            raise DaytonaTimeoutError("no answer")
        made.append(DaytonaSandbox(params))
        return made[-1]


class ModalErrors(ModuleType):
    class Error(Exception): ...

    class AuthError(Error): ...

    class PermissionDeniedError(Error): ...

    class NotFoundError(Error): ...

    class ResourceExhaustedError(Error): ...

    class ConnectionError(Error): ...  # noqa: A001 - Modal calls it so

    class TimeoutError(Error): ...  # noqa: A001 - likewise

    class ServiceError(Error): ...


class App:
    @staticmethod
    def lookup(name: str, *, create_if_missing: bool = False) -> "App":
        return App()


class Image:
    def __init__(self, tag: str) -> None:
        self.tag = tag

    @staticmethod
    def from_registry(tag: str) -> "Image":
        return Image(tag)


class ModalSandbox:
    def __init__(self, machine: FakeMachine, ports: list[int]) -> None:
        self.object_id, self.machine, self._ports = "modal-1", machine, ports

    @staticmethod
    def create(
        *args: str,
        app: App | None = None,
        image: Image | None = None,
        env: dict[str, str] | None = None,
        timeout: int | None = 300,
        idle_timeout: int | None = None,
        encrypted_ports: Any = (),
    ) -> "ModalSandbox":
        assert image is not None
        if image.tag.startswith("no-such"):
            raise ModalErrors.NotFoundError("no such image")
        if image.tag.startswith("silent"):
            raise ModalErrors.ConnectionError("no answer")
        machine = FakeMachine(env or {})
        machine.begin(*args)
        made.append(ModalSandbox(machine, list(encrypted_ports)))
        return made[-1]

    def tunnels(self, timeout: int = 50) -> dict[int, Any]:
        return {port: SimpleNamespace(url=f"http://127.0.0.1:{port}") for port in self._ports}

    def exec(self, *args: str, timeout: int | None = None) -> Any:
        if not self.machine.there:
            raise ModalErrors.NotFoundError("no such sandbox")
        self.machine.renewed += args == ("true",)
        process = self.machine.begin(*args)
        said = process.communicate()[0].decode()
        return SimpleNamespace(wait=lambda: 0, stdout=SimpleNamespace(read=lambda: said))

    def poll(self) -> int | None:
        return None if self.machine.there else 137

    def terminate(self, *, wait: bool = False) -> int | None:
        self.machine.end()
        return None


made: list[Any] = []
"""Sandboxes of both, in the order of their creation."""

SIGNATURES: Final[dict[str, dict[str, Any]]] = {
    "daytona": {
        "Daytona.create": Daytona.create,
        "Sandbox.create_signed_preview_url": DaytonaSandbox.create_signed_preview_url,
        "Sandbox.set_ttl": DaytonaSandbox.set_ttl,
        "Sandbox.refresh_data": DaytonaSandbox.refresh_data,
        "Sandbox.delete": DaytonaSandbox.delete,
        "DaytonaConfig": DaytonaConfig,
        "CreateSandboxFromImageParams": CreateSandboxFromImageParams,
        "_sync.process.Process.exec": FakeProcess.exec,
        "DaytonaError": DaytonaError,
        **{each.__name__: None for each in DaytonaError.__subclasses__()},
    },
    "modal": {
        "App.lookup": App.lookup,
        "Image.from_registry": Image.from_registry,
        "Sandbox.create": ModalSandbox.create,
        "Sandbox.tunnels": ModalSandbox.tunnels,
        "Sandbox.exec": ModalSandbox.exec,
        "Sandbox.poll": ModalSandbox.poll,
        "Sandbox.terminate": ModalSandbox.terminate,
        **{f"exception.{each.__name__}": None for each in ModalErrors.Error.__subclasses__()},
    },
}


def module(name: str) -> ModuleType:
    """Return a fake client, as a module."""
    found = ModuleType(name)
    if name == "daytona":
        kinds = (
            Daytona,
            DaytonaConfig,
            CreateSandboxFromImageParams,
            DaytonaError,
            *DaytonaError.__subclasses__(),
        )
        vars(found).update({kind.__name__: kind for kind in kinds})
    else:
        vars(found).update(App=App, Image=Image, Sandbox=ModalSandbox, exception=ModalErrors)
    return found
