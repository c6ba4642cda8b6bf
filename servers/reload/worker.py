"""The process that serves: `python -m servers.reload.worker`, which the supervisor starts below a guard."""

import os
import socket
import sys
import traceback
from typing import Any

from openenv_core.errors import ConfigurationError, OpenEnvError
from openenv_core.tracebacks import authors_part, show
from servers.reload.plan import FAILED, ReloadPlan


def main() -> int:
    """Load and serve; where that cannot be, say why, here and to everybody who asks."""
    plan = ReloadPlan.take(os.environ)
    os.set_inheritable(plan.listener, False)
    try:
        return _serve(plan)
    except OpenEnvError as error:
        print(f"ropewalk: {error}", file=sys.stderr, flush=True)  # noqa: T201
        why = str(error)
    except Exception as error:
        show(error)
        why = "".join(traceback.format_exception(error.with_traceback(authors_part(error))))
    print("ropewalk: the server could not start; waiting for the next change", flush=True)  # noqa: T201
    if plan.settings.exposed:
        why = "the environment could not be loaded; the server's log tells why"
    return _turn_all_away(plan, why)


def _turn_all_away(plan: ReloadPlan, why: str) -> int:
    """Answer every request with 503 and the reason, until the supervisor ends this process."""
    try:
        from servers.hosting import Assembled, host
        from servers.security import TurnedAwayError, turn_away
    except ModuleNotFoundError:
        return FAILED

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "lifespan":
            await turn_away(TurnedAwayError(503, why), scope, send)

    with socket.socket(fileno=plan.listener) as listener:
        return host(Assembled(app), [listener], drain_s=0)


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
