"""The last layer, which looks at loss tokens alone."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

import rl_bridge.titan.devices  # noqa: F401 - before TorchTitan's modules
from rl_bridge.algorithms.logprobs import token_logprobs

# isort: split
from torchtitan.models.common import Linear


@dataclass(kw_only=True, slots=True, frozen=True)
class LossTokens:
    """What a pass is asked for.

    Attributes:
        row: Where the hidden state is from which each loss token is predicted, shape [T].
        column: Likewise, shape [T].
        target: The loss tokens, shape [T].
        temperature: Divides the logits.
        chunk: How many tokens have logits at once.
    """

    row: Tensor
    column: Tensor
    target: Tensor
    temperature: float
    chunk: int


class TokenOutputs(NamedTuple):
    """What is said of loss tokens, each float32 and of shape [T].

    Attributes:
        logprobs: Of each under the distribution that the engine sampled it from; of a critic the value of what came
            before it.
        entropy: Of that distribution, in nats; None of a critic.
    """

    logprobs: Tensor
    entropy: Tensor | None


class OutputLayer(Linear):
    """TorchTitan's output layer for one pass at a time, which asks by `wanted`.

    It is called within the model's forward pass, so that FSDP gathers its weights once for all chunks. Tensor-parallel
    ranks have a part of the vocabulary each, and tell each other sums alone.

    Attributes:
        wanted: What the next pass is asked for.
    """

    wanted: LossTokens

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        """As for TorchTitan's."""

    def forward(self, input: Tensor) -> TokenOutputs:  # noqa: A002 - TorchTitan calls it so
        """From hidden states, shape [B, L, D]."""
        wanted, weight = self.wanted, self.weight
        first, group = 0, None
        if isinstance(weight, DTensor):
            _, (first, _) = compute_local_shape_and_global_offset(
                weight.shape, weight.device_mesh, weight.placements
            )
            group, weight = weight.device_mesh.get_group(), weight.to_local()
        if isinstance(input, DTensor):  # of which each rank's gradient is that of its part of the vocabulary
            input = input.to_local(grad_placements=[Partial()])  # noqa: A001
        chosen = input[wanted.row, wanted.column]
        logprobs, entropy = token_logprobs(
            chosen,
            weight,
            wanted.target,
            temperature=wanted.temperature,
            chunk=wanted.chunk,
            first=first,
            group=group,
        )
        return TokenOutputs(logprobs, entropy)


class ValueHead(Linear):
    """One number a token in place of logits. Every tensor-parallel rank has all of it."""

    wanted: LossTokens

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        """As for TorchTitan's."""

    def forward(self, input: Tensor) -> TokenOutputs:  # noqa: A002 - TorchTitan calls it so
        """From hidden states, shape [B, L, D]."""
        hidden = input.to_local() if isinstance(input, DTensor) else input
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        chosen = hidden[self.wanted.row, self.wanted.column]
        return TokenOutputs((chosen @ weight[0]).float(), None)
