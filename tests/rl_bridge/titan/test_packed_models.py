"""Documents packed into rows have the log-probabilities and the gradients that they have one by one."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_checkpoints import NAMES, documents, make_checkpoint

from rl_bridge.buffer.batch import TrainBatch

pytestmark = pytest.mark.heavy

TEMPERATURE = 0.7


@pytest.mark.parametrize("name", NAMES)
def test_packing_changes_neither_log_probabilities_nor_gradients(name: str, tmp_path: Path) -> None:
    from rl_bridge.titan.model import TitanModel

    batch = documents()

    model = TitanModel(
        make_checkpoint(tmp_path, name),
        dtype="float32",
        max_length=32,
        trainable=True,
        device=torch.device("cpu"),
    )
    alone = [batch.take(np.flatnonzero(batch.context == one)) for one in range(len(batch.lengths))]
    assert not batch.packed().one_a_row, "nothing was packed"
    assert batch.packed().tokens.shape[0] < 0.6 * len(alone)
    packed, packed_gradients = passes(model, [batch])
    single, single_gradients = passes(model, alone)
    order = np.concatenate([np.flatnonzero(batch.context == one) for one in range(len(alone))])
    assert single.std() > 0.3
    torch.testing.assert_close(packed[order], single, atol=1e-5, rtol=0.0)
    assert max(float(one.abs().max()) for one in single_gradients.values()) > 0.01
    for which, gradient in single_gradients.items():
        torch.testing.assert_close(packed_gradients[which], gradient, atol=1e-5, rtol=0.0, msg=which)


def passes(model: Any, parts: list[TrainBatch]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss tokens' log-probabilities, and the gradient of their mean weighted by the advantages."""
    from rl_bridge.titan.logprobs import log_distributions

    model.module.zero_grad()
    tokens = sum(map(len, parts))
    found = []
    for part in parts:
        with model.spmd():
            distribution = log_distributions(model, part, temperature=TEMPERATURE)
            chosen = distribution.gather(-1, torch.from_numpy(part.target).unsqueeze(-1)).squeeze(-1)
            (chosen * torch.from_numpy(part.advantages)).sum().div(tokens).backward()
        found.append(chosen.detach())
    gradients = {name: one.grad.full_tensor().clone() for name, one in model.module.named_parameters()}
    return torch.cat(found), gradients
