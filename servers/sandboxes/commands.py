"""Commands as processes of this machine: nothing holds them in, so they are for tests and for code that is trusted."""

import base64
import json
import sys
from pathlib import Path
from typing import Final

from openenv_core.providers.process import LocalProcessProvider
from openenv_core.providers.remote.messages import SandboxSpec
from servers.sandboxes.backend import SandboxProvider
from servers.sandboxes.refusals import SandboxRefusal

_LAUNCHER: Final = str(Path(__file__).with_name("_launch.py"))


def command_provider(spec: SandboxSpec) -> SandboxProvider:
    """Return what runs a command, under the guard that ends it with this process.

    Raises:
        SandboxRefusal: It asks for limits, which a plain process does not have.
    """
    limits = ("memory_bytes", "cpus", "pids", "network")
    if asked := [name for name in limits if getattr(spec, name) is not None]:
        raise SandboxRefusal(
            422,
            "unsupported",
            f"expected a command without {', '.join(asked)}: this service runs it as a plain process; give an image",
        )
    words = spec.command or []
    if any("\0" in word for word in words):
        raise SandboxRefusal(422, "invalid", "expected words without NUL in the command, got one")
    packed = base64.urlsafe_b64encode(json.dumps(words).encode()).decode()
    return LocalProcessProvider(
        f"the command {words[0]!r}",
        env_vars=spec.env_vars,
        start_timeout_s=spec.start_timeout_s,
        command=(sys.executable, "-I", "-S", _LAUNCHER, "{fd}", packed),
    )
