"""The policy as a Monarch actor."""

import asyncio
import inspect
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from monarch.actor import concurrent_endpoint

from rl_bridge.config import Config
from rl_bridge.errors import EngineFailedError
from rl_bridge.generator.replica import PolicyReplica
from rl_bridge.generator.vllm_api import engine_environment
from rl_bridge.services.actor import BoundOptions, ServiceActor
from rl_bridge.services.options import GpuLock, derive_seed
from rl_bridge.weights.store import WeightStore

POLL_INTERVAL_S = 5.0
"""How often the engine's health is checked."""
SHUTDOWN_TIMEOUT_S = 60.0
"""How long the process may take to end after the engine has failed."""

T = TypeVar("T")

_log = logging.getLogger(__name__)


def _make_endpoint(method: Callable[..., Any]) -> Any:
    """Make an endpoint that calls the replica's method of the same name."""

    async def call(self: "PolicyActor", *args: Any, **kwargs: Any) -> Any:
        result = method(self._replica, *args, **kwargs)
        return await self._hide_engine_failure(result) if inspect.isawaitable(result) else result

    call.__name__ = call.__qualname__ = method.__name__
    return concurrent_endpoint(call)


class PolicyActor(ServiceActor):
    """A thin shell around `PolicyReplica`. Its process ends with its engine, so that the service restarts it."""

    REPLAYED = (("update_weights", "sleep"),)  # a sleeping replica needs no weights, which may be gone
    REPEATABLE = frozenset({"generate", "generate_many", "version"})

    def __init__(self, config: Config, model_path: str | Path, store: WeightStore | None = None) -> None:
        gpu_lock = GpuLock() if config.monarch.colocate and store is not None else None
        self._replica = PolicyReplica(
            config, model_path, store, gpu_lock=gpu_lock, seed=derive_seed(config.seed)
        )

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
        ended = asyncio.wrap_future(self._replica.ended)
        try:
            while not ended.done():
                self._replica.health()
                await asyncio.wait({ended}, timeout=POLL_INTERVAL_S)
            ended.result()
        except Exception:
            _log.exception("the engine has failed; this process ends")
            sys.stderr.flush()
            os._exit(1)

    async def _hide_engine_failure(self, work: Awaitable[T]) -> T:
        """Await `work`, but withhold the error of a failed engine from the caller, which is not to blame.

        The process ends meanwhile, so the service sees a lost replica and retries the call on another one.
        """
        try:
            return await work
        except EngineFailedError:
            await asyncio.sleep(SHUTDOWN_TIMEOUT_S)
            raise

    generate = _make_endpoint(PolicyReplica.generate)
    generate_many = _make_endpoint(PolicyReplica.generate_many)
    abort = _make_endpoint(PolicyReplica.abort)
    update_weights = _make_endpoint(PolicyReplica.update_weights)
    sleep = _make_endpoint(PolicyReplica.sleep)
    version = _make_endpoint(PolicyReplica.version)
    statistics = _make_endpoint(PolicyReplica.statistics)
    health = _make_endpoint(PolicyReplica.health)

    @concurrent_endpoint
    async def close(self) -> None:
        """See `PolicyReplica.close`."""
        self._watch.cancel()
        await self._replica.close()
