"""A batch, shared out over all replicas of the reference policy."""

import asyncio

import numpy as np
from numpy.typing import NDArray

from rl_bridge.buffer.batch import TrainBatch
from rl_bridge.buffer.packing import share_out
from rl_bridge.services.handle import Routed


async def reference_logprobs(reference: Routed, batch: TrainBatch) -> NDArray[np.float32]:
    """The log-probability of each loss token under the reference policy, shape [T].

    Every replica that serves gets contexts of about as many tokens as the others.

    Raises:
        BridgeError: A replica raised it, or none is to be had any more.
    """
    roster = getattr(reference, "roster", None)  # an object of this process is its own only replica
    replicas = 1 if roster is None else max(1, len(roster.targets))
    shares = share_out(batch.lengths, ranks=replicas, budget=int(batch.lengths.sum()))
    parts = [np.flatnonzero(np.isin(batch.context, contexts)) for (contexts,) in shares if len(contexts)]
    answers = await asyncio.gather(*(reference.logprobs.route(batch.take(part)) for part in parts))
    logprobs = np.empty(len(batch), dtype=np.float32)
    for part, answer in zip(parts, answers, strict=True):
        logprobs[part] = answer
    return logprobs
