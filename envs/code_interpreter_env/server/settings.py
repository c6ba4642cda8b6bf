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
"""How `tasks` calls those that come with the environment."""

NO_TASKS: Final = "none"

PACKAGES: Final = ("matplotlib", "numpy", "pandas", "scipy", "sympy")
"""What a reset may ask for unless the server is told otherwise, as far as it is installed."""

PRELOAD: Final = ("numpy",)
"""What an interpreter has when the reset does not say, likewise."""

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
        backend: Where code runs: "local", or one of the hosted ones.
        preload: Packages that an interpreter has imported when the reset does not say.
        packages: Packages that a reset may ask for, those of `preload` among them.
        limits: Of a session, unless its reset says otherwise.
        ceilings: What a reset may raise them to.
        max_snapshot: Whether a reset may ask for snapshots: each execution is a fork then, and the code may fork too.
        minimum_isolation: The weakest level to serve at; None: `lsm` where callers beyond this machine reach the
            server, anything elsewhere.
        strongest_isolation: The level to begin the search with.
        max_sandboxes: Sets of packages at once; each takes a process of its own.
        tasks: A folder of tasks, or one file of them; "shipped" are those that come with the environment, "none" none.
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
        """Refuse what contradicts itself.

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
        if self.backend == LOCAL and (absent := [name for name in self.packages if not _is_installed(name)]):
            raise ConfigurationError(
                f"expected installed packages in {PREFIX}PACKAGES and {PREFIX}PRELOAD, got {', '.join(absent)}; "
                "install them where the server runs, or leave them out"
            )

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> "InterpreterSettings":
        """Read the settings from environment variables; those that are absent or empty keep their defaults.

        Raises:
            ConfigurationError: A value cannot be used.
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
        """Where the server's tasks lie, with their tests."""
        if self.tasks == NO_TASKS:
            return ()
        return ((SHIPPED_TASKS if self.tasks == SHIPPED else Path(self.tasks)).resolve(),)

    def required_isolation(self, exposed: bool | None) -> Isolation:
        """Return the weakest level to serve at.

        Args:
            exposed: Whether callers beyond this machine reach the server; None: not known.

        Raises:
            ConfigurationError: The strongest level that may be tried is weaker.
        """
        named = self.minimum_isolation
        minimum = named or (Isolation.PROCESS if exposed is False else Isolation.LSM)
        if not self.strongest_isolation.at_least(minimum):
            where = "" if named else " for a server that is, or may be, reached from beyond this machine"
            raise ConfigurationError(
                f"expected an isolation of at least {minimum}{where}, got {STRONGEST}={self.strongest_isolation}; "
                f"{describe_remedy(self.strongest_isolation)}"
            )
        return minimum


def describe_remedy(level: str = "LEVEL") -> str:
    """Return what a message advises where the isolation is too weak."""
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
    """Return a variable's value as a type has it."""
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
