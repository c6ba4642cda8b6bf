"""Real engines: what their processes are started with, and a checkpoint for them."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RandomPolicy = Callable[[Path, int, int], Path]


@pytest.fixture
def roles_can_import_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    here = str(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([here, os.environ.get("PYTHONPATH", "")]))


@pytest.fixture(scope="session")
def long_policy(tmp_path_factory: pytest.TempPathFactory, random_policy: RandomPolicy) -> Path:
    """A checkpoint like `tiny_policy` that takes longer prompts, and never ends an answer by itself."""
    return random_policy(tmp_path_factory.mktemp("long_policy"), 40, 2)


@pytest.fixture(scope="module")
def reference(long_policy: Path) -> Any:
    """The same checkpoint as transformers computes it."""
    import torch
    from transformers import Qwen3ForCausalLM

    return Qwen3ForCausalLM.from_pretrained(str(long_policy), dtype=torch.float32).eval()
