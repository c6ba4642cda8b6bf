"""A checkpoint that can be sharded over two ranks, and a pair of ranks, each shared by the tests of a file."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from trainer_ranks import Ranks, ranks

from tests.rl_bridge.titan.tiny_checkpoints import make_checkpoint


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("divisible")
    return make_checkpoint(folder, "qwen3", num_hidden_layers=2, hidden_size=32, head_dim=16)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with ranks(tmp_path_factory.mktemp("four"), 4) as made:
        yield made


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with ranks(tmp_path_factory.mktemp("pair"), 2) as two:
        yield two
