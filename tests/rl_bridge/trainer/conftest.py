"""A checkpoint that two ranks can share, and a pair of ranks, for the tests of one file each."""

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
