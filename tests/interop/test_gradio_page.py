"""A page that an author made with Gradio, as the released package has it, on our server."""

import sys
from pathlib import Path

import pytest
from module_run import finished
from released import DRIVERS, environment, python
from serve_process import SUPPORT, serve

pytestmark = [pytest.mark.interop, pytest.mark.timeout(600)]

VISITORS = """
import sys
from gradio_client import Client
one, two = (Client(sys.argv[1], verbose=False) for _ in range(2))
for visitor, name in ((one, "reset"), (one, "step"), (two, "reset"), (two, "step"), (one, "step")):
    print(visitor.predict(api_name=f"/{name}"))
"""


def gradio_alone(folder: Path) -> str:
    """Return a folder with Gradio and its dependencies, without those installed here and the released package."""
    (there,) = python("0.10.0").parents[1].glob("lib/python3*/site-packages")
    here = {path.name.partition("-")[0] for path in Path(sys.prefix).glob("lib/python3*/site-packages/*")}
    for path in there.iterdir():
        name = path.name.partition("-")[0]
        if name not in here and not name.startswith(("openenv", "_", "distutils")):
            (folder / path.name).symlink_to(path)
    return str(folder)


def test_visitors_of_a_gradio_page_have_their_own_sessions(tmp_path: Path) -> None:
    folders = ":".join((gradio_alone(tmp_path), str(DRIVERS), SUPPORT))
    variables = {"PYTHONPATH": folders, "GRADIO_ANALYTICS_ENABLED": "False"}
    with serve("--web", app="gradio_page:app", **variables) as server:
        command = [sys.executable, "-c", VISITORS, f"http://{server.address}/web/"]
        done = finished(*command, env=environment(**variables), cwd=SUPPORT, timeout_s=200)
        reset = "OpenEnv Agentic Environment: counter: 3"
        assert done.stdout.splitlines() == [reset, "5 5 1", reset, "5 5 1", "7 7 2"], done.stderr
        assert server.get("/capacity")[1]["in_use"] == 2
        assert server.get("/web/metadata")[1]["name"] == "counter"
