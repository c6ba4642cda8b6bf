"""Which image, how many containers, and what each gets."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from openenv_core.errors import ConfigurationError
from openenv_core.providers.docker.options import ContainerOptions

from ...settings import MINIMUM, PREFIX

IMAGE: Final = f"{PREFIX}CONTAINER_IMAGE"
SIZE: Final = f"{PREFIX}CONTAINERS"
MEMORY: Final = f"{PREFIX}CONTAINER_MEMORY"
CPUS: Final = f"{PREFIX}CONTAINER_CPUS"


def _fenced() -> ContainerOptions:
    return ContainerOptions(network="none", memory="1g", cpus=1.0, stop_timeout_s=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSettings:
    """The containers of one server.

    Attributes:
        image: Name or id of an image that serves this environment, or another of OpenEnv that runs code. It is not
            pulled.
        size: Containers, warm or in use: as many sessions there can be.
        options: What each container gets; by default no network, 1 GB of memory, one CPU, and no privileges.
        lease_s: Seconds that a session waits for a container.
        slack_s: Seconds that a reply may take beyond the time of the code.

    Raises:
        ConfigurationError: A value that cannot be.
    """

    image: str
    size: int = 4
    options: ContainerOptions = field(default_factory=_fenced)
    lease_s: float = 60.0
    slack_s: float = 20.0

    def __post_init__(self) -> None:
        if not self.image:
            raise ConfigurationError("expected the name of an image, got nothing")
        if isinstance(self.size, bool) or not isinstance(self.size, int) or self.size < 1:
            raise ConfigurationError(f"expected at least 1 container, got {self.size!r}")

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> "ContainerSettings":
        """Read CODE_INTERPRETER_CONTAINER_IMAGE, and how many containers with how much memory and CPU time.

        What the server itself is told of the weakest isolation to serve at, the server in each container is told too.

        Raises:
            ConfigurationError: There is no image, or a value cannot be.
        """
        image = environ.get(IMAGE, "").strip()
        if not image:
            raise ConfigurationError(f"expected {IMAGE} to name an image, got nothing; set it")
        size = environ.get(SIZE, "").strip() or "4"
        cpus = environ.get(CPUS, "").strip() or "1"
        minimum = environ.get(MINIMUM, "").strip()
        try:
            fields: dict[str, Any] = {"size": int(size)}
            share = float(cpus)
        except ValueError:
            raise ConfigurationError(
                f"expected numbers for {SIZE} and {CPUS}, got {size!r} and {cpus!r}"
            ) from None
        options = ContainerOptions(
            network="none",
            memory=environ.get(MEMORY, "").strip() or "1g",
            cpus=share,
            stop_timeout_s=0.0,
            env_vars={MINIMUM: minimum} if minimum else {},
        )
        return cls(image=image, options=options, **fields)
