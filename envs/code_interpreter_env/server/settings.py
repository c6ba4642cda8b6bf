"""The settings of a code interpreter server, from environment variables that begin with CODE_INTERPRETER_."""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from openenv_core.errors import ConfigurationError
from openenv_core.sandbox import Isolation, Limits, LimitsError

from ..tasks import SHIPPED as SHIPPED_TASKS

PREFIX: Final = "CODE_INTERPRETER_"
MINIMUM: Final = f"{PREFIX}MINIMUM_ISOLATION"
STRONGEST: Final = f"{PREFIX}STRONGEST_ISOLATION"

LOCAL: Final = "local"

SHIPPED: Final = "shipped"
"""The value of `tasks` that selects the tasks that come with the environment."""

NO_TASKS: Final = "none"

PACKAGES: Final = ("matplotlib", "numpy", "pandas", "scipy", "sympy")
"""The default for `packages`, as far as they are installed."""

PRELOAD: Final = ("numpy",)
"""The default for `preload`, as far as they are installed."""

CEILINGS: Final = Limits(
    timeout_s=60.0,
    grace_s=2.0,
    memory_bytes=2 << 30,
    output_bytes=1 << 20,
    output_hard_bytes=64 << 20,
    outputs_bytes=16 << 20,
    file_bytes=256 << 20,
    disk_bytes=256 << 20,
    files=16_384,
    open_files=256,
    processes=64,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class InterpreterSettings:
    """The settings of one server's interpreters.

    Attributes:
        backend: The name of the backend that runs code: "local" or "together".
        preload: Packages that an interpreter has imported unless the reset chooses others.
        packages: Packages that a reset may choose; includes those of `preload`.
        limits: Limits of a session unless the reset changes them.
        ceilings: The maximum to which a reset may raise each limit.
        max_snapshot: Whether a reset may enable snapshots. Each execution is then a fork, and the code may fork too.
        minimum_isolation: The weakest isolation level to serve at. None requires `lsm` if the server is, or may be,
            reachable from other machines, and nothing otherwise.
        strongest_isolation: The first isolation level to try; weaker ones follow.
        max_sandboxes: The maximum number of package sets in use at once; each takes a process.
        tasks: A folder of tasks or a single file; "shipped" for those that come with the environment, or "none".
    """

    backend: str = LOCAL
    preload: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)
    ceilings: Limits = CEILINGS
    max_snapshot: bool = False
    minimum_isolation: Isolation | None = None
    strongest_isolation: Isolation = Isolation.NAMESPACES
    max_sandboxes: int = 4
    tasks: str = SHIPPED

    def __post_init__(self) -> None:
        """Check that the settings are consistent.

        Raises:
            ConfigurationError: A limit exceeds its ceiling, or a package cannot be preloaded.
        """
        try:
            self.limits.within(self.ceilings)
        except LimitsError as error:
            raise ConfigurationError(f"{error}; ceilings are {PREFIX}MAX_ and the limit's name") from None
        if stray := [name for name in self.preload if name not in self.packages]:
            raise ConfigurationError(
                f"expected {PREFIX}PRELOAD among {PREFIX}PACKAGES, got {', '.join(stray)}; name it in both"
            )
        if self.backend == LOCAL and (missing := [name for name in self.packages if not _is_installed(name)]):
            raise ConfigurationError(
                f"expected installed packages in {PREFIX}PACKAGES and {PREFIX}PRELOAD, got {', '.join(missing)}; "
                "install them where the server runs, or leave them out"
            )

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> "InterpreterSettings":
        """Read the settings from environment variables; missing or empty ones select the defaults.

        Raises:
            ConfigurationError: A value is invalid.
        """
        variables = {
            name: value for name, value in environ.items() if name.startswith(PREFIX) and value.strip()
        }
        backend = variables.get(f"{PREFIX}BACKEND", LOCAL).strip().lower()
        values: dict[str, Any] = {"backend": backend}
        for variable, (name, kind) in _VARIABLES.items():
            if variable in variables:
                values[name] = _parse_value(variable, variables[variable].strip(), kind)
        installed = tuple(name for name in PACKAGES if backend == LOCAL and _is_installed(name))
        values.setdefault(
            "preload", tuple(name for name in PRELOAD if name in values.get("packages", installed))
        )
        values.setdefault("packages", tuple(dict.fromkeys((*installed, *values["preload"]))))
        limits, ceilings = _read_limits(variables, "", Limits()), _read_limits(variables, "MAX_", CEILINGS)
        return cls(limits=limits, ceilings=ceilings, **values)

    @property
    def task_files(self) -> tuple[Path, ...]:
        """The folder or file of the server's tasks, which includes their hidden tests."""
        if self.tasks == NO_TASKS:
            return ()
        return ((SHIPPED_TASKS if self.tasks == SHIPPED else Path(self.tasks)).resolve(),)

    def required_isolation(self, exposed: bool | None) -> Isolation:
        """Return the weakest level to serve at.

        Args:
            exposed: Whether the server is reachable from other machines; None if unknown.

        Raises:
            ConfigurationError: `strongest_isolation` is weaker than that level.
        """
        explicit = self.minimum_isolation
        minimum = explicit or (Isolation.PROCESS if exposed is False else Isolation.LSM)
        if not self.strongest_isolation.at_least(minimum):
            scope = "" if explicit else " for a server that is, or may be, reached from beyond this machine"
            raise ConfigurationError(
                f"expected an isolation of at least {minimum}{scope}, got {STRONGEST}={self.strongest_isolation}; "
                f"{describe_remedy(self.strongest_isolation)}"
            )
        return minimum


def describe_remedy(level: str = "LEVEL") -> str:
    """Return the advice that ends an error message about weak isolation."""
    return (
        f"set {MINIMUM}={level} to serve at that level all the same, bind to 127.0.0.1, or run where Landlock and "
        "seccomp are available (docs/sandbox.md)"
    )


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package.partition(".")[0]) is not None
    except ValueError:
        return False


def _read_limits(variables: Mapping[str, str], prefix: str, defaults: Limits) -> Limits:
    values: dict[str, Any] = {}
    for limit in fields(Limits):
        variable = f"{PREFIX}{prefix}{limit.name.upper()}"
        if text := variables.get(variable, "").strip():
            values[limit.name] = _parse_value(variable, text, limit.type)
    try:
        return defaults.changed(values)
    except LimitsError as error:
        raise ConfigurationError(f"{error} (from {PREFIX}{prefix}...)") from None


def _parse_value(variable: str, text: str, kind: Any) -> Any:
    """Parse a variable's value as a type."""
    try:
        return TypeAdapter(kind).validate_strings(text)
    except ValidationError as error:
        reason = error.errors(include_url=False)[0]["msg"]
        raise ConfigurationError(f"expected {variable} to be usable, got {text!r:.80}: {reason}") from None


def _parse_packages(text: str) -> tuple[str, ...]:
    names = tuple(text.replace(",", " ").split())
    return () if names == ("none",) else names


_Packages: TypeAlias = Annotated[tuple[str, ...], BeforeValidator(_parse_packages)]
_Level: TypeAlias = Annotated[Isolation, BeforeValidator(str.lower)]

_VARIABLES: Final[Mapping[str, tuple[str, Any]]] = {
    f"{PREFIX}PRELOAD": ("preload", _Packages),
    f"{PREFIX}PACKAGES": ("packages", _Packages),
    MINIMUM: ("minimum_isolation", _Level),
    STRONGEST: ("strongest_isolation", _Level),
    f"{PREFIX}MAX_SANDBOXES": ("max_sandboxes", Annotated[int, Field(ge=1)]),
    f"{PREFIX}TASKS": ("tasks", str),
    f"{PREFIX}MAX_SNAPSHOT": ("max_snapshot", bool),
}
