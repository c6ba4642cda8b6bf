"""A checkpoint for tests of engines, and the same as transformers loads it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RandomPolicy = Callable[[Path, int, int], Path]


@pytest.fixture(scope="session")
def long_policy(tmp_path_factory: pytest.TempPathFactory, random_policy: RandomPolicy) -> Path:
    """A checkpoint like `tiny_policy` with longer prompts and without an end-of-sequence token."""
    return random_policy(tmp_path_factory.mktemp("long_policy"), 40, 2)


@pytest.fixture(scope="module")
def reference(long_policy: Path) -> Any:
    """The same checkpoint loaded by transformers."""
    import torch
    from transformers import Qwen3ForCausalLM

    return Qwen3ForCausalLM.from_pretrained(str(long_policy), dtype=torch.float32).eval()
