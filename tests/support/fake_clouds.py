"""Fakes of Daytona's and Modal's clients, whose sandboxes are processes of this machine.

Each function takes only parameters of the real one, so that calls which the real client refuses are refused here.
`CLIENTS` has their names, and a test compares them with the real clients.
"""

import os
import signal
import subprocess
from contextlib import suppress
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any, Final


class FakeMachine:
    """The processes of a sandbox, and whether it exists."""

    def __init__(self, env: dict[str, str]) -> None:
        self.env, self.processes, self.renewed, self.there = env, list["subprocess.Popen[bytes]"](), 0, True
        made.append(self)

    def begin(self, *words: str) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen(words, env=self.env, stdout=subprocess.PIPE, start_new_session=True)
        self.processes.append(process)
        return process

    def end(self) -> None:
        self.there = False
        for each in self.processes:
            with each, suppress(ProcessLookupError):
                os.killpg(each.pid, signal.SIGKILL)


made: list[FakeMachine] = []
"""The machines of both clouds, in order of creation."""


class DaytonaError(Exception):
    status_code: int | None = None


def _kinds(base: type[Exception], *names: str, **members: Any) -> dict[str, Any]:
    return {name: type(name, (base,), members) for name in names}


DAYTONA_ERRORS = {
    **_kinds(DaytonaError, "DaytonaTimeoutError", "DaytonaConnectionError", "DaytonaServiceUnavailableError"),
    **_kinds(DaytonaError, "DaytonaNotFoundError", status_code=404),
}


@dataclass
class DaytonaConfig:
    api_key: str | None = None
    api_url: str | None = None


@dataclass
class CreateSandboxFromImageParams:
    image: str
    env_vars: dict[str, str] = field(default_factory=dict)
    ephemeral: bool | None = None
    auto_stop_interval: int | None = None
    ttl_minutes: int | None = None


class DaytonaProcess:
    def __init__(self, machine: FakeMachine) -> None:
        self._machine = machine

    def exec(self, command: str, cwd: Any = None, env: Any = None, timeout: int | None = None) -> Any:
        return SimpleNamespace(result=self._machine.begin("sh", "-c", command).communicate()[0].decode())


class DaytonaSandbox:
    def __init__(self, params: CreateSandboxFromImageParams) -> None:
        self.id, self.state = "daytona-1", "creating"
        self._params, self._machine = params, FakeMachine(params.env_vars)
        self.process = DaytonaProcess(self._machine)

    def create_signed_preview_url(self, port: int, expires_in_seconds: int | None = None) -> Any:
        return SimpleNamespace(url=f"http://127.0.0.1:{port}")

    def set_ttl(self, ttl_minutes: int, request_timeout: float | None = None) -> None:
        if not self._machine.there:
            raise DAYTONA_ERRORS["DaytonaNotFoundError"]
        assert ttl_minutes == self._params.ttl_minutes
        self._machine.renewed += 1

    def refresh_data(self, request_timeout: float | None = None) -> None:
        self.state = "started" if self._machine.there else "destroyed"

    def delete(self, timeout: float | None = 60, wait: bool = False) -> None:
        self._machine.end()


class Daytona:
    def __init__(self, config: DaytonaConfig | None = None) -> None: ...

    def create(self, params: CreateSandboxFromImageParams, *, timeout: float = 60) -> DaytonaSandbox:
        if params.image.startswith("no-such"):
            raise DAYTONA_ERRORS["DaytonaNotFoundError"]
        if params.image.startswith("silent"):
            raise DAYTONA_ERRORS["DaytonaTimeoutError"]
        return DaytonaSandbox(params)


class ModalError(Exception): ...


MODAL_ERRORS = _kinds(
    ModalError,
    "AuthError",
    "PermissionDeniedError",
    "NotFoundError",
    "ResourceExhaustedError",
    "ConnectionError",
    "TimeoutError",
    "ServiceError",
)


class App:
    @staticmethod
    def lookup(name: str, *, create_if_missing: bool = False) -> None: ...


class Image:
    @staticmethod
    def from_registry(tag: str) -> str:
        return tag


class ModalSandbox:
    object_id = "modal-1"

    def __init__(self, machine: FakeMachine, ports: list[int]) -> None:
        self._machine, self._ports = machine, ports

    @staticmethod
    def create(
        *args: str,
        app: None,
        image: str,
        env: dict[str, str],
        timeout: int | None = 300,
        idle_timeout: int | None = None,
        encrypted_ports: Any = (),
    ) -> "ModalSandbox":
        if image.startswith("no-such"):
            raise MODAL_ERRORS["NotFoundError"]
        if image.startswith("silent"):
            raise MODAL_ERRORS["ConnectionError"]
        machine = FakeMachine(env)
        machine.begin(*args)
        return ModalSandbox(machine, list(encrypted_ports))

    def tunnels(self, timeout: int = 50) -> dict[int, Any]:
        return {port: SimpleNamespace(url=f"http://127.0.0.1:{port}") for port in self._ports}

    def exec(self, *args: str, timeout: int | None = None) -> Any:
        if not self._machine.there:
            raise MODAL_ERRORS["NotFoundError"]
        self._machine.renewed += args == ("true",)
        output = self._machine.begin(*args).communicate()[0].decode()
        return SimpleNamespace(wait=lambda: 0, stdout=SimpleNamespace(read=lambda: output))

    def poll(self) -> int | None:
        return None if self._machine.there else 137

    def terminate(self, *, wait: bool = False) -> None:
        self._machine.end()


CLIENTS: Final[dict[str, dict[str, Any]]] = {
    "daytona": {
        "Daytona": Daytona,
        "DaytonaConfig": DaytonaConfig,
        "CreateSandboxFromImageParams": CreateSandboxFromImageParams,
        "Sandbox": DaytonaSandbox,
        "_sync.process.Process": DaytonaProcess,
        "DaytonaError": DaytonaError,
        **DAYTONA_ERRORS,
    },
    "modal": {
        "App": App,
        "Image": Image,
        "Sandbox": ModalSandbox,
        "exception.Error": ModalError,
        **{f"exception.{name}": kind for name, kind in MODAL_ERRORS.items()},
    },
}


def module(name: str) -> ModuleType:
    """Return a fake client as a module."""
    fake_module = ModuleType(name)
    vars(fake_module).update(CLIENTS[name], exception=SimpleNamespace(Error=ModalError, **MODAL_ERRORS))
    return fake_module
