"""The policy as a Monarch actor."""

import asyncio
import functools
import logging
import os
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from monarch.actor import concurrent_endpoint

from rl_bridge.config import Config
from rl_bridge.errors import EngineFailedError
from rl_bridge.generator.base import UpdateMetrics
from rl_bridge.generator.replica import PolicyReplica
from rl_bridge.generator.vllm_api import EngineTotals, engine_environment
from rl_bridge.services.actor import BoundOptions, ServiceActor
from rl_bridge.services.own_process import GpuLock, derive_seed
from rl_bridge.types import Completion, PolicyVersion, SamplingSettings
from rl_bridge.weights.store import WeightStore

POLL_INTERVAL_S = 5.0
"""How often the engine's health is checked."""
SHUTDOWN_TIMEOUT_S = 60.0
"""How long the process may take to end after the engine has failed."""

_log = logging.getLogger(__name__)


def _engine_endpoint(method: Callable[..., Coroutine[Any, Any, Any]]) -> Any:
    """Make a concurrent endpoint that withholds the error of a failed engine from its caller, who is not to blame.

    The process ends meanwhile, so the service sees a lost replica and retries the call on another one.
    """

    @functools.wraps(method)
    async def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return await method(*args, **kwargs)
        except EngineFailedError:
            await asyncio.sleep(SHUTDOWN_TIMEOUT_S)
            raise

    return concurrent_endpoint(call)


class PolicyActor(ServiceActor):
    """Has an engine complete prompts, with the weights that `PolicyReplica` loads.

    Its process ends with its engine, so that the service restarts it.
    """

    REPLAYED = (
        ("update_weights", "load_checkpoint", "sleep"),
    )  # a sleeping replica needs no weights, which may be gone
    REPEATABLE = frozenset({"generate", "generate_many", "version"})

    def __init__(self, config: Config, model_path: str | Path, store: WeightStore | None = None) -> None:
        rollout = config.rollout
        self._sampling = SamplingSettings(
            temperature=rollout.temperature, max_new_tokens=rollout.max_new_tokens
        )
        gpu_lock = GpuLock() if config.monarch.colocate and store is not None else None
        self._replica = PolicyReplica(
            config, model_path, store, gpu_lock=gpu_lock, seed=derive_seed(config.seed)
        )
        self._engine = self._replica.engine
        self._requests: set[asyncio.Future[list[Completion]]] = set()

    @classmethod
    def options(
        cls, *, with_gpus: bool = False, environment: Mapping[str, str] | None = None, **options: Any
    ) -> BoundOptions:
        """See `ServiceActor.options`; `with_gpus` also determines vLLM's environment variables."""
        variables = engine_environment(on_gpu=with_gpus) | dict(environment or {})
        return super().options(with_gpus=with_gpus, environment=variables, **options)

    @concurrent_endpoint
    async def setup(self) -> None:
        """Load the engine; returns when it can generate."""
        await self._replica.setup()
        self._watch = asyncio.ensure_future(self._exit_with_engine())

    async def _exit_with_engine(self) -> None:
        ended = asyncio.wrap_future(self._engine.ended)
        try:
            while not ended.done():
                self._engine.check()
                await asyncio.wait({ended}, timeout=POLL_INTERVAL_S)
            ended.result()
        except Exception:
            _log.exception("the engine has failed; this process ends")
            sys.stderr.flush()
            os._exit(1)

    @_engine_endpoint
    async def generate(
        self, prompt: Sequence[int], sampling: SamplingSettings | None = None, seed: int | None = None
    ) -> Completion:
        """Complete one prompt; see `Engine.generate`. The sampling settings default to those of `rollout`."""
        seeds = None if seed is None else [seed]
        work = self._engine.generate([prompt], sampling or self._sampling, seeds)
        return (await asyncio.wrap_future(work))[0]

    @_engine_endpoint
    async def generate_many(self, *args: Any) -> list[Completion]:
        """See `Engine.generate`."""
        request = asyncio.wrap_future(self._engine.generate(*args))
        self._requests.add(request)
        request.add_done_callback(self._requests.discard)
        return await request

    @_engine_endpoint
    async def abort(self, ids: Sequence[str]) -> None:
        """See `Engine.abort`."""
        await asyncio.wrap_future(self._engine.abort(ids))

    @_engine_endpoint
    async def update_weights(self, version: PolicyVersion) -> UpdateMetrics:
        """See `PolicyReplica.update_weights`."""
        return await self._replica.update_weights(version)

    @_engine_endpoint
    async def load_checkpoint(self, path: str, version: PolicyVersion) -> UpdateMetrics:
        """See `PolicyReplica.load_checkpoint`."""
        return await self._replica.load_checkpoint(path, version)

    @_engine_endpoint
    async def sleep(self) -> None:
        """See `PolicyReplica.sleep`."""
        await self._replica.sleep()

    @concurrent_endpoint
    async def version(self) -> PolicyVersion:
        """Return the version of the weights that the engine samples from."""
        return self._engine.version

    @concurrent_endpoint
    async def statistics(self) -> EngineTotals:
        """Return the engine's totals since it started."""
        return self._engine.statistics.totals

    @concurrent_endpoint
    async def health(self) -> None:
        """See `Engine.check`."""
        self._engine.check()

    @concurrent_endpoint
    async def drain(self) -> None:
        """Wait until no request is in progress."""
        while self._requests:
            await asyncio.wait(self._requests)

    @concurrent_endpoint
    async def close(self) -> None:
        """See `PolicyReplica.close`."""
        self._watch.cancel()
        await self._replica.close()
