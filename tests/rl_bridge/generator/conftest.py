"""Real engines, in this process."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from torch import Tensor

WAIT_S = 60.0
"""A bound for what would hang otherwise; none is meant to come near it."""


@pytest.fixture(scope="module")
def engine_environment() -> Iterator[None]:
    """The variables that an engine's process is started with, and the thread that they leave it."""
    import torch

    from rl_bridge.generator.settings import engine_environment

    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    with pytest.MonkeyPatch.context() as patch:
        for name, value in engine_environment(on_gpu=False).items():
            patch.setenv(name, value)
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def long_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint like `tiny_policy` that takes longer prompts, and never ends an answer by itself."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("long_policy")
    torch.manual_seed(2)
    config = Qwen3Config(
        vocab_size=40,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    Qwen3ForCausalLM(config).float().save_pretrained(str(folder))
    return folder


@pytest.fixture(scope="module")
def reference(long_policy: Path) -> Any:
    """The same checkpoint as transformers computes it."""
    import torch
    from transformers import Qwen3ForCausalLM

    return Qwen3ForCausalLM.from_pretrained(str(long_policy), dtype=torch.float32).eval()


@pytest.fixture
def weights(engine: Any, long_policy: Path) -> Iterator[Callable[[int], "dict[str, Tensor]"]]:
    """Versions: other weights for each number; 0 is the checkpoint, to which the module's engine returns."""
    from generator_fixtures import perturbed

    from rl_bridge.generator.checkpoint import Checkpoint

    first = Checkpoint(long_policy).tensors()
    yield lambda version: perturbed(first, seed=version) if version else first
    engine.load(0, first).result(WAIT_S)
