"""Fixtures of the bridge's tests: checkpoints, the environment of an engine, and import paths of started processes."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture
def importable_modules(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let processes that the test starts import the modules of its folder."""
    monkeypatch.setenv("PYTHONPATH", str(request.path.parent), prepend=os.pathsep)


@pytest.fixture(scope="session")
def tiny_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of Qwen3's architecture with random weights, as the example makes it."""
    from examples.grpo_blackjack import chat
    from rl_bridge.tiny_policy import make_tiny_policy

    return make_tiny_policy(tmp_path_factory.mktemp("tiny_policy") / "policy", chat.render_prompts(), seed=1)


@pytest.fixture(scope="session")
def random_policy() -> Callable[[Path, int, int], Path]:
    """Return a function (folder, vocabulary size, seed) that makes a checkpoint without an end-of-sequence token."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    def make(folder: Path, vocabulary: int, seed: int) -> Path:
        torch.manual_seed(seed)
        config = Qwen3Config(
            vocab_size=vocabulary,
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

    return make


@pytest.fixture(scope="module")
def engine_environment() -> Iterator[None]:
    """Set the environment variables of an engine's process, and one thread."""
    import torch

    from rl_bridge.generator.vllm_api import engine_environment

    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    with pytest.MonkeyPatch.context() as patch:
        for name, value in engine_environment(on_gpu=False).items():
            patch.setenv(name, value)
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        yield
    torch.set_num_threads(threads)
