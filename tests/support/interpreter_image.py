"""An image that serves the code interpreter."""

import shutil
import tempfile
from pathlib import Path

import pytest
from docker_engine import ROOT, content_of, digest_of, run_build

from openenv_core.providers.docker import DockerEngine

TAG = "ropewalk-test-interpreter:latest"

DOCKERFILE = """
FROM {base}
COPY envs /app/envs
WORKDIR /app
CMD ["ropewalk", "serve", "envs.code_interpreter_env.server.app:app", "--host", "0.0.0.0", "--port", "8000"]
"""


@pytest.fixture(scope="session")
def interpreter_image(engine: DockerEngine, hostile_image: str) -> str:
    """An image of the current code interpreter, based on the image that has Ropewalk."""
    with tempfile.TemporaryDirectory() as folder:
        context = Path(folder)
        base = engine.call("GET", f"/images/{hostile_image}/json")["Id"]
        (context / "Dockerfile").write_text(DOCKERFILE.format(base=hostile_image) + f"# on {base}\n")
        (context / "envs").mkdir()
        (context / "envs" / "__init__.py").touch()
        name = "code_interpreter_env"
        unneeded = shutil.ignore_patterns("__pycache__", "*.pyc")
        shutil.copytree(ROOT / "envs" / name, context / "envs" / name, ignore=unneeded)
        content = digest_of(context)
        if content_of(engine, TAG) != content:
            run_build(context, TAG, content)
    return TAG


__all__ = ["TAG", "interpreter_image"]
