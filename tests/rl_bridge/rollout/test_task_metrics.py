"""What a task of the user's measures."""

import json

import numpy as np
import pytest
import torch

from rl_bridge.errors import RolloutError
from rl_bridge.rollout.task import to_floats


def test_numbers_of_any_library_can_be_logged() -> None:
    metrics = to_floats({"wins": np.float32(0.5), "length": torch.tensor([3]), "lost": 1}, "metrics")
    assert json.loads(json.dumps(metrics)) == {"wins": 0.5, "length": 3.0, "lost": 1.0}


@pytest.mark.parametrize("value", ["most", None, [1.0, 2.0], torch.zeros(2)])
def test_what_is_no_number_is_refused_by_name(value: object) -> None:
    with pytest.raises(RolloutError, match=r"the task's probe\(\), got wins="):
        to_floats({"wins": value}, "probe")
