"""The critic: a policy's body with one number a token."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_checkpoints import (
    NAMES,
    WIDTH,
    documents,
    load_reference,
    make_checkpoint,
    model_logprobs,
    rows,
    titan,
)

pytestmark = pytest.mark.heavy


def critic(path: Path, *, dtype: str = "float32") -> Any:
    return titan(path, dtype=dtype, trainable=True, value_head=True)


def give_head(model: Any) -> torch.Tensor:
    head = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(6))
    with torch.no_grad():
        model.module.state_dict()["lm_head.weight"].to_local().copy_(head)
    return head


@pytest.mark.parametrize("name", NAMES)
def test_values_come_from_the_policys_hidden_state(name: str, tmp_path: Path) -> None:
    """By hand: the product of the head with what transformers has before its last layer."""
    path, tokens = make_checkpoint(tmp_path, name), rows()
    model = critic(path)
    assert not model_logprobs(model, tokens).any(), "an untrained critic expects nothing"
    head = give_head(model)
    with torch.no_grad():
        hidden = load_reference(path).model(tokens).last_hidden_state[:, :-1]
    expected = (hidden @ head.T).squeeze(-1)
    assert expected.std() > 0.3
    torch.testing.assert_close(model_logprobs(model, tokens), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_a_reward_model_has_its_head_already(name: str, tmp_path: Path) -> None:
    """The value of the last token is the score that transformers gives the row."""
    from transformers import AutoModelForSequenceClassification

    path, tokens = make_checkpoint(tmp_path, name, score=True), rows()
    reference = AutoModelForSequenceClassification.from_pretrained(str(path), dtype=torch.float32).eval()
    reference.config.pad_token_id = -1  # no token is padding
    with torch.no_grad():
        expected = reference(tokens).logits.squeeze(-1)
    assert expected.std() > 0.1
    # A token behind the row, of which nothing is asked but what is before it.
    longer = torch.cat([tokens, tokens[:, :1]], dim=1)
    torch.testing.assert_close(model_logprobs(critic(path), longer)[:, -1], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_loss_token_has_the_float32_value_of_what_came_before_it(tmp_path: Path, dtype: str) -> None:
    model, batch = critic(make_checkpoint(tmp_path, "qwen2-tied"), dtype=dtype), documents()
    give_head(model)
    assert not batch.pack_rows().one_a_row
    with torch.no_grad(), model.spmd():
        ours = model.outputs(model.pack(batch)).logprobs
        alone = [batch.take(np.flatnonzero(batch.context == one)) for one in range(len(batch.lengths))]
        expected = torch.cat([model.outputs(model.pack(one)).logprobs for one in alone])
    order = np.argsort(batch.context, kind="stable")
    assert ours.dtype == torch.float32
    near = 1e-5 if dtype == "float32" else 0.1
    torch.testing.assert_close(ours[order], expected, atol=near, rtol=near)
