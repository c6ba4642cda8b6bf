"""What the tests of the bridge share."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of Qwen3's architecture with random weights, as the example makes it."""
    from examples.grpo_blackjack.tiny_policy import make_tiny_policy

    return make_tiny_policy(tmp_path_factory.mktemp("tiny_policy"), seed=1)
