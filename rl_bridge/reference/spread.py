"""A batch, shared out over all replicas of the reference policy."""

import asyncio

import numpy as np
from numpy.typing import NDArray

from rl_bridge.buffer.batch import TrainBatch
from rl_bridge.services.handle import Routed


async def reference_logprobs(reference: Routed, batch: TrainBatch) -> NDArray[np.float32]:
    """The log-probability of each loss token under the reference policy, shape [T].

    Every replica that serves gets contexts of about as many tokens as the others.

    Raises:
        BridgeError: A replica raised it, or none is to be had any more.
    """
    roster = getattr(reference, "roster", None)  # an object of this process is its own only replica
    parts = _shares(batch, 1 if roster is None else max(1, len(roster.targets)))
    answers = await asyncio.gather(*(reference.logprobs.route(batch.take(part)) for part in parts))
    logprobs = np.empty(len(batch), dtype=np.float32)
    for part, answer in zip(parts, answers, strict=True):
        logprobs[part] = answer
    return logprobs


def _shares(batch: TrainBatch, count: int) -> list[NDArray[np.int64]]:
    """The indices of the loss tokens of each share; as many shares as there are contexts at most."""
    longest_first = np.argsort(-batch.lengths, kind="stable")
    # Dealt like cards to and fro, so that nobody always gets the longer one.
    order = [*range(count), *reversed(range(count))]
    share = np.empty(len(longest_first), dtype=np.int64)
    share[longest_first] = np.resize(order, len(longest_first))
    shares = (np.flatnonzero(share[batch.context] == number) for number in range(count))
    return [tokens for tokens in shares if len(tokens)]
