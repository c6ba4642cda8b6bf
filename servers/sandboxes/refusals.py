"""What a service of sandboxes says instead of yes."""


class SandboxRefusal(Exception):  # noqa: N818 - what the caller gets
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

    @property
    def body(self) -> dict[str, str]:
        """The response's body."""
        return {"detail": str(self), "code": self.code}

    @property
    def headers(self) -> dict[str, str]:
        """What else the response carries."""
        return {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}


def no_such_sandbox(sandbox_id: str) -> SandboxRefusal:
    """Return the refusal for a sandbox that is not there, or is somebody else's."""
    return SandboxRefusal(
        404,
        "no_such_sandbox",
        f"expected a sandbox of yours, got {sandbox_id!r}; it ended, its lease ran out, or it never was",
    )
