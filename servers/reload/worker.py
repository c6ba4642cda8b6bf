"""The process that serves: `python -m servers.reload.worker`, which the supervisor starts below a guard."""

import os
import socket
import sys

from openenv_core.errors import ConfigurationError, OpenEnvError
from servers.reload.plan import FAILED, ReloadPlan
from servers.tracebacks import show


def main() -> int:
    """Load and serve; say why where that cannot be."""
    plan = ReloadPlan.take(os.environ)
    os.set_inheritable(plan.listener, False)
    try:
        return _serve(plan)
    except OpenEnvError as error:
        print(f"ropewalk: {error}", file=sys.stderr, flush=True)  # noqa: T201
    except Exception as error:
        show(error)
    return FAILED


def _serve(plan: ReloadPlan) -> int:
    from servers.target import load_app

    app = load_app(plan.app)
    try:
        from servers.assembly import assemble
        from servers.hosting import host
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"expected a server's packages, got: {error}; pip install 'ropewalk[server]'"
        ) from error
    from servers.logs import configure_logging

    configure_logging(plan.log_level, plan.settings.tokens)
    assembled = assemble(app, plan.app, plan.settings, plan.options)

    def started() -> None:
        if plan.again:
            print("ropewalk: serving again", flush=True)  # noqa: T201

    with socket.socket(fileno=plan.listener) as listener:
        return host(assembled, [listener], drain_s=plan.settings.drain_s, on_started=started)


if __name__ == "__main__":
    sys.exit(main())
