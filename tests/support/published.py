"""A published chat model for tests: SmolLM2-135M-Instruct, as `scripts/published-model` makes it."""

import subprocess
import sys
from functools import cache
from pathlib import Path

from missing import missing

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"
SCRIPT = ROOT / "scripts" / "published_model.py"
"""What the command runs once its environment is there: installing that would disturb the one that tests run in."""
MAKING_TIMEOUT_S = 900


@cache
def published_model() -> Path:
    """Return its folder, in the Hugging Face layout; it is made if it is not there. Skips the test if it cannot be."""
    if (MODEL / "model.safetensors").is_file():
        return MODEL
    how = f"needs a checkpoint in {MODEL}; get it with scripts/published-model, which needs a package index"
    try:
        done = subprocess.run(
            [sys.executable, SCRIPT],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=MAKING_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        missing(f"{how}: {error}")
    return Path(done.stdout.strip().rpartition("\n")[2])
