"""What a server in a container of a local engine holds, looked at by a program that is run beside it."""

import inspect
from typing import Any, Final

from openenv_core.checker.check import NotApplicable
from openenv_core.checker.subject import RunningServer
from openenv_core.checker.watching import hook, inside
from openenv_core.checker.watching.held import Held
from openenv_core.errors import ProviderError

PYTHON: Final = "python3"
NOTES: Final = "/tmp/ropewalk-collected"

BEGIN: Final = """\
import os, sys
folder = "/tmp/ropewalk-check"
os.makedirs(folder, exist_ok=True)
with open(folder + "/sitecustomize.py", "w") as file:
    file.write(sys.argv[1])
path = os.environ.get("PYTHONPATH")
os.environ["PYTHONPATH"] = folder + (os.pathsep + path if path else "")
os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
os.execvp(sys.argv[2], sys.argv[2:])
"""
"""Puts the hook in front of the server's interpreter, and becomes the image's own command."""


def options_for(image: str) -> dict[str, Any]:
    """Return the options of a container whose interpreters throw their garbage away when told to.

    Raises:
        NotApplicable: The image's command cannot be put after another.
    """
    from openenv_core.providers.docker.engine import Engine

    config = Engine.find().call("GET", f"/images/{image}/json").get("Config") or {}
    if config.get("Entrypoint") or not config.get("Cmd"):
        raise NotApplicable(
            "the image has an ENTRYPOINT, before which nothing can be put that looks into its server; with CMD "
            "alone there can"
        )
    return {
        "command": [PYTHON, "-c", BEGIN, inspect.getsource(hook), *config["Cmd"]],
        "env_vars": {hook.COLLECTED: NOTES},
    }


def collect(server: RunningServer) -> None:
    """Tell the processes of a server to throw their garbage away, and wait until they have.

    Raises:
        NotApplicable: None of them listens.
    """
    if not _run(server, "collect", NOTES).get("told"):
        raise NotApplicable("the server's interpreter cannot be told to throw its garbage away")


def held(server: RunningServer) -> Held:
    """Look at what a server holds just now.

    Raises:
        NotApplicable: The container has no Python to look with.
    """
    return Held(**_run(server, "look"))


def _run(server: RunningServer, *arguments: str) -> dict[str, Any]:
    from openenv_core.providers.docker.engine import Engine

    container, engine = server.container, Engine.find()
    command = [PYTHON, "-I", "-c", inspect.getsource(inside), *arguments]
    # With a terminal the engine sends what is printed as it is, without headers of its own.
    body = {"Cmd": command, "AttachStdout": True, "Tty": True}
    try:
        started = engine.call("POST", f"/containers/{container.id}/exec", body=body)["Id"]
        found = engine.call("POST", f"/exec/{started}/start", body={"Detach": False, "Tty": True})
    except ProviderError as error:
        raise NotApplicable(f"the container cannot be looked into: {error}") from error
    if not isinstance(found, dict):
        raise NotApplicable(f"the container cannot be looked into: it has no {PYTHON} that answers")
    return found
