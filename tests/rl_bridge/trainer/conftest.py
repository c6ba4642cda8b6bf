"""A checkpoint that can be sharded over two ranks, and a pair of ranks, each shared by the tests of a file."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from trainer_ranks import Ranks, divisible_policy, ranks


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return divisible_policy(tmp_path_factory.mktemp("divisible"))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with ranks(tmp_path_factory.mktemp("pair"), 2) as two:
        yield two
