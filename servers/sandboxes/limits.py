"""What a service of sandboxes allows, and what it says instead of yes."""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

from openenv_core.providers.remote import SandboxSpec


class SandboxRefusalError(Exception):
    """A request is refused.

    Args:
        status: The HTTP status.
        code: One word, for programs.
        detail: What was expected, what came, what to do.
        retry_after_s: Whole seconds until it is worth another try.
    """

    def __init__(self, status: int, code: str, detail: str, retry_after_s: int | None = None) -> None:
        super().__init__(detail)
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s


DEFAULT_MEMORY_BYTES: Final = 2 * 2**30


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
        max_pids: The most processes and threads of one sandbox. One that asks for no limit gets the provider's.
        images: Patterns of the images that may be run, as in `my-env:*`; none: all that the engine has.
        allow_commands: Whether commands are run without an image, as the service's own user.
    """

    max_sandboxes: int = 16
    max_sandboxes_per_token: int | None = None
    max_starting: int = 4
    max_lease_s: float = 3_600.0
    max_start_timeout_s: float = 600.0
    max_memory_bytes: int | None = DEFAULT_MEMORY_BYTES
    max_pids: int = 1024
    images: tuple[str, ...] = ()
    allow_commands: bool = False

    def admit(self, spec: SandboxSpec) -> SandboxSpec:
        """Return what is to be run, with the limits that go without saying.

        Raises:
            SandboxRefusalError: It is not allowed here.
        """
        if spec.image is None and not self.allow_commands:
            raise SandboxRefusalError(
                403,
                "commands_not_allowed",
                "expected an image, got a command alone, which this service does not run; start it with "
                "--allow-commands if every token may run anything as its user",
            )
        if spec.image is not None and self.images:
            spec = spec.model_copy(update={"image": self._admit_image(spec.image)})
        self.admit_lease(spec.lease_s)
        if spec.start_timeout_s > self.max_start_timeout_s:
            raise _above("start_timeout_s", f"{self.max_start_timeout_s:g}", f"{spec.start_timeout_s:g}")
        if spec.pids is not None and spec.pids > self.max_pids:
            raise _above("pids", str(self.max_pids), f"{spec.pids}; ask for fewer")
        most = self.max_memory_bytes
        if spec.image is None or most is None:
            return spec
        if spec.memory_bytes is not None and spec.memory_bytes > most:
            raise _above("memory_bytes", f"{most} (--max-memory)", str(spec.memory_bytes))
        return spec.model_copy(update={"memory_bytes": spec.memory_bytes or most})

    def admit_lease(self, lease_s: float) -> None:
        """Let a lease pass. SandboxRefusalError: it is longer than allowed."""
        if lease_s > self.max_lease_s:
            raise _above("lease_s", f"{self.max_lease_s:g} (--max-lease)", f"{lease_s:g}")

    def _admit_image(self, image: str) -> str:
        """Return the image's whole name, which is what is run: a part of an id is no name any more with a tag."""
        name, tag = _named(image)
        for pattern in self.images:
            of_name, of_tag = ("*", "*") if pattern == "*" else _named(pattern)
            if fnmatchcase(name, of_name) and fnmatchcase(tag, of_tag):
                return f"{name}:{tag}"
        raise SandboxRefusalError(
            403,
            "image_not_allowed",
            f"expected an image that this service allows, got {image!r}; its --image options name them",
        )


def _above(name: str, most: str, asked: str) -> SandboxRefusalError:
    return SandboxRefusalError(422, "limit", f"expected {name} of at most {most}, got {asked}")


def _named(text: str) -> tuple[str, str]:
    """Return name and tag of an image or a pattern. A registry's port belongs to the name, as does a digest's kind."""
    if ":" not in text.rpartition("/")[2]:
        return text, "latest"
    name, _, tag = text.rpartition(":")
    return name, tag
