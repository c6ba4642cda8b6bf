"""What the tests of `ropewalk sandboxes` share: a service, E2B's clients on it, an engine."""

from docker_engine import engine
from e2b_service import client, create, sandbox, service, template

__all__ = ["client", "create", "engine", "sandbox", "service", "template"]
