"""What a service of sandboxes allows."""

from dataclasses import dataclass

from openenv_core.providers.remote.messages import SandboxSpec
from servers.sandboxes.refusals import SandboxRefusal


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxLimits:
    """The limits of one service.

    Attributes:
        max_sandboxes: Sandboxes at once, those that have ended and are not deleted yet included.
        max_sandboxes_per_token: The same, of one token; None: only the cap of all.
        max_starting: Starts that are under way at once; further ones wait for their turn.
        max_lease_s: The longest lease.
        max_start_timeout_s: The longest time that a start may be given.
        max_memory_bytes: The most memory of one sandbox, and what one gets that asks for none; None: any.
        images: Patterns of the images that may be run, as in `my-env:*`; none: all that the engine has.
        allow_commands: Whether commands are run without an image, as the service's own user.
    """

    max_sandboxes: int = 16
    max_sandboxes_per_token: int | None = None
    max_starting: int = 4
    max_lease_s: float = 3_600.0
    max_start_timeout_s: float = 600.0
    max_memory_bytes: int | None = None
    images: tuple[str, ...] = ()
    allow_commands: bool = False

    def admit(self, spec: SandboxSpec) -> SandboxSpec:
        """Return what is to be run, with the limits that go without saying.

        Raises:
            SandboxRefusal: It is not allowed here.
        """
        from fnmatch import fnmatchcase

        if spec.image is None and not self.allow_commands:
            raise SandboxRefusal(
                403,
                "commands_not_allowed",
                "expected an image, got a command alone, which this service does not run; start it with "
                "--allow-commands if every token may run anything as its user",
            )
        if spec.image is not None and self.images:
            name = spec.image if ":" in spec.image.rpartition("/")[2] else f"{spec.image}:latest"
            if not any(fnmatchcase(name, pattern) for pattern in self.images):
                raise SandboxRefusal(
                    403,
                    "image_not_allowed",
                    f"expected an image that this service allows, got {name!r}; its --image options name them",
                )
        self.admit_lease(spec.lease_s)
        if spec.start_timeout_s > self.max_start_timeout_s:
            raise SandboxRefusal(
                422,
                "limit",
                f"expected start_timeout_s of at most {self.max_start_timeout_s:g}, got {spec.start_timeout_s:g}",
            )
        return self._with_memory(spec) if spec.image is not None else spec

    def admit_lease(self, lease_s: float) -> None:
        """Let a lease pass.

        Raises:
            SandboxRefusal: It is longer than allowed.
        """
        if lease_s > self.max_lease_s:
            raise SandboxRefusal(
                422,
                "limit",
                f"expected lease_s of at most {self.max_lease_s:g} (--max-lease), got {lease_s:g}",
            )

    def _with_memory(self, spec: SandboxSpec) -> SandboxSpec:
        most = self.max_memory_bytes
        if most is None:
            return spec
        if spec.memory_bytes is None:
            return spec.model_copy(update={"memory_bytes": most})
        if spec.memory_bytes > most:
            raise SandboxRefusal(
                422,
                "limit",
                f"expected memory_bytes of at most {most} (--max-memory), got {spec.memory_bytes}",
            )
        return spec
