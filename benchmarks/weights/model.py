"""A model with the shapes of a small language model and a given number of parameters."""

import torch
from torch import nn

DIM, HIDDEN, VOCABULARY = 640, 1728, 32_768
LAYER_PARAMETERS = 4 * DIM * DIM + 3 * DIM * HIDDEN + 2 * DIM


class Layer(nn.Module):
    """The matrices and norms of one transformer layer."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(DIM, DIM, bias=False))
        self.gate_proj = nn.Linear(DIM, HIDDEN, bias=False)
        self.up_proj = nn.Linear(DIM, HIDDEN, bias=False)
        self.down_proj = nn.Linear(HIDDEN, DIM, bias=False)
        self.input_layernorm = nn.LayerNorm(DIM, bias=False)
        self.post_attention_layernorm = nn.LayerNorm(DIM, bias=False)


class Model(nn.Module):
    """An embedding and as many layers as the number of parameters allows.

    Args:
        parameters: Approximate number of parameters.
    """

    def __init__(self, parameters: int) -> None:
        super().__init__()
        layers = max(1, round((parameters - DIM * VOCABULARY) / LAYER_PARAMETERS))
        self.embed_tokens = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))


def make_model(parameters: int) -> Model:
    """Return the model on the meta device; `to_empty` allocates its memory."""
    with torch.device("meta"):
        return Model(parameters).requires_grad_(False)
