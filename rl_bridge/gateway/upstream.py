"""A policy on another server, which gives token ids and log-probabilities, as `vllm serve` does."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from rl_bridge.config import RolloutConfig
from rl_bridge.generator.client import GeneratorClient
from rl_bridge.generator.endpoint import Endpoint, EndpointEngine
from rl_bridge.rollout.policy import ChatPolicy
from rl_bridge.services.handle import LocalService
from rl_bridge.tokens.chat import ChatTokenizer
from rl_bridge.types import Completion


class _Upstream:
    """The endpoints of a policy's service, of an engine in this process."""

    def __init__(self, engine: EndpointEngine) -> None:
        self._engine = engine

    async def generate_many(self, *args: Any) -> list[Completion]:
        """See `Engine.generate`."""
        return await asyncio.wrap_future(self._engine.generate(*args))

    async def abort(self, ids: Sequence[str]) -> None:
        """See `Engine.abort`."""
        await asyncio.wrap_future(self._engine.abort(ids))


@asynccontextmanager
async def upstream_policy(
    endpoint: Endpoint, tokenizer: ChatTokenizer, rollout: RolloutConfig
) -> AsyncIterator[ChatPolicy]:
    """Connect to a server, have it sample one token at `rollout.temperature`, and return the policy on it.

    Raises:
        ConfigError: The server does not serve the model, or its answers lack tokens or log-probabilities.
        GeneratorError: It cannot be reached.
    """
    engine = EndpointEngine(endpoint, rollout)
    try:
        await asyncio.wrap_future(engine.start())
        # One prompt a call: a server batches by itself, and a call ends with its longest answer.
        service = LocalService(_Upstream(engine))
        client = GeneratorClient(
            service, max_batch=1, max_calls=rollout.max_num_seqs, timeout_s=rollout.timeout_s
        )
        try:
            policy = ChatPolicy(
                tokenizer, client, max_new_tokens=rollout.max_new_tokens, max_length=rollout.max_length
            )
            prompt = tokenizer.prompt([{"role": "user", "content": "a"}])
            await policy.answer(prompt, temperature=rollout.temperature, max_new_tokens=1)
            yield policy
        finally:
            await client.close()
    finally:
        await asyncio.to_thread(engine.close)
