"""Every architecture on two ranks says and learns what it says and learns on one."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from spread_models import computed, on_two_ranks
from tiny_checkpoints import NAMES, make_checkpoint

pytestmark = [pytest.mark.heavy, pytest.mark.soak, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    # Heads that two ranks can share: two of keys and values, of four.
    return {name: make_checkpoint(folder / name, name) for name in NAMES}


@pytest.fixture(scope="module")
def alone(checkpoints: dict[str, Path]) -> dict[str, Any]:
    return {name: computed(path) for name, path in checkpoints.items()}


@pytest.fixture(scope="module", params=[1, 2], ids=["fsdp", "tensor parallel"])
def pair(
    request: pytest.FixtureRequest, checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    return on_two_ranks(tmp_path_factory.mktemp("pair"), checkpoints, tensor=request.param)


@pytest.mark.parametrize("kind", ["policy", "critic"])
@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_hold_half_each_and_compute_what_one_computes(
    name: str, kind: str, alone: dict[str, Any], pair: list[dict[str, Any]]
) -> None:
    one = alone[name][kind]
    assert one["outputs"].std() > 0.3
    for rank in pair:
        two = rank[name][kind]
        assert two["held"] < 0.6 * one["held"]
        np.testing.assert_allclose(two["outputs"], one["outputs"], atol=1e-5, rtol=1e-5)
        assert set(two["weights"]) == set(one["weights"])
        near = 1e-5 * max(np.abs(array).max() for array in one["weights"].values())  # sums in another order
        for which, array in one["weights"].items():  # after an update: so the gradients are the same too
            np.testing.assert_allclose(two["weights"][which], array, atol=near, rtol=1e-4, err_msg=which)
