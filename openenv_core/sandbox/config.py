"""What a sandbox is told."""

from dataclasses import dataclass
from pathlib import Path

from openenv_core.errors import ConfigurationError
from openenv_core.sandbox.levels import Isolation


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxConfig:
    """How interpreters are made.

    Attributes:
        preload: Modules that are imported once, before interpreters are forked. Importing them again costs nothing
            there, and their memory is shared.
        strongest: Where the search for a rung of the ladder begins.
        minimum: Where it ends: without a rung that holds at or above this one, the sandbox does not start.
        readable: Files and folders that code may read, beside Python and what is installed with it.
        hidden: Files and folders in there that code may not read. The packages of this project always are.
        boot_timeout_s: Seconds for the zygote and its imports.
        start_timeout_s: Seconds for one interpreter.
    """

    preload: tuple[str, ...] = ()
    strongest: Isolation = Isolation.NAMESPACES
    minimum: Isolation = Isolation.LSM
    readable: tuple[Path, ...] = ()
    hidden: tuple[Path, ...] = ()
    boot_timeout_s: float = 120.0
    start_timeout_s: float = 20.0

    def __post_init__(self) -> None:
        if not self.strongest.at_least(self.minimum):
            raise ConfigurationError(
                f"expected a strongest level at or above the minimum {self.minimum}, got {self.strongest}; "
                "from the strongest: namespaces, lsm, seccomp, process"
            )
        for name in self.preload:
            if not all(part.isidentifier() for part in name.split(".")):
                raise ConfigurationError(f"expected names of modules to preload, got {name!r}")
