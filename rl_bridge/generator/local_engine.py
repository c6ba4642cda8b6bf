"""vLLM's engine inside this process, stepped by the event loop that uses it."""

import asyncio
from typing import Any

LOOP_ITERATIONS_PER_STEP = 4
"""Iterations of the event loop after each step, so that new requests start and finished ones are returned at once."""


class Collector:
    """Receives one request's output, like vLLM's own collector."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def get(self) -> Any:
        """Wait for the output; None for an aborted request."""
        return await self.future


class LocalEngine:
    """A `vllm.LLMEngine` with those methods of `vllm.v1.engine.async_llm.AsyncLLM` that `VllmEngine` calls.

    They run synchronously on the event loop, so never during a step. An error in a step fails all pending requests.
    """

    def __init__(self, engine: Any) -> None:
        self.model_config = engine.model_config
        self._engine = engine
        self._requests: dict[str, Collector] = {}
        self._pauses = {"paused": False, "asleep": False}
        self._changed = asyncio.Event()
        self._failure: Exception | None = None
        self._step_task = asyncio.ensure_future(self._step_loop())

    async def _step_loop(self) -> None:
        try:
            while True:
                while not self._requests or any(self._pauses.values()):
                    self._changed.clear()
                    await self._changed.wait()
                for output in self._engine.step():
                    if output.finished:
                        self._deliver(output)
                for _ in range(LOOP_ITERATIONS_PER_STEP):
                    await asyncio.sleep(0)
        except Exception as error:
            self._failure = error  # for `check_health`, even if no request is pending
            for collector in self._requests.values():
                if not collector.future.done():
                    collector.future.set_exception(error)
                    collector.future.exception()  # marks it as retrieved: of a batch only the first is awaited

    def _deliver(self, output: Any) -> None:
        collector = self._requests.pop(output.request_id, None)
        if collector is not None and not collector.future.done():  # it is done if the caller was cancelled
            collector.future.set_result(output)

    async def add_request(self, request_id: str, prompt: Any, params: Any, *, lora_request: Any) -> Collector:
        """Add a request; returns the collector of its output."""
        self._engine.add_request(request_id, prompt, params, lora_request=lora_request)
        self._requests[request_id] = collector = Collector(request_id)
        self._changed.set()
        return collector

    async def abort(self, ids: list[str], *, internal: bool) -> None:
        """Abort requests."""
        self._engine.abort_request(ids)
        for request_id in ids:
            collector = self._requests.pop(request_id, None)
            if collector is not None and not collector.future.done():
                collector.future.set_result(None)

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        """Make no step until `resume_generation`; with `clear_cache`, requests recompute their keys and values."""
        self._pauses["paused"] = True
        if clear_cache:
            self._engine.reset_prefix_cache(reset_running_requests=True)

    async def resume_generation(self) -> None:
        """Resume stepping."""
        self._resume("paused")

    async def sleep(self, *, level: int, mode: str) -> None:
        """Stop stepping until it wakes, and free memory."""
        self._engine.sleep(level=level, mode=mode)
        self._pauses["asleep"] = True

    async def wake_up(self, tags: list[str]) -> None:
        """Take memory back; stepping resumes with the tag "kv_cache", and requests recompute their keys and values."""
        if "kv_cache" in tags:
            self._engine.reset_prefix_cache(reset_running_requests=True)
        self._engine.wake_up(tags)
        if "kv_cache" in tags:
            self._resume("asleep")

    def _resume(self, reason: str) -> None:
        self._pauses[reason] = False
        self._changed.set()

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> None:
        """Call a method on each worker."""
        self._engine.collective_rpc(method, args=args)

    async def update_weight_version(self, version: str) -> None:
        """Set the version of the weights that tokens report from now on."""
        self._engine.set_weight_version(version)

    async def add_lora(self, request: Any) -> None:
        """Load an adapter."""
        self._engine.add_lora(request)

    async def remove_lora(self, number: int) -> None:
        """Remove an adapter."""
        self._engine.remove_lora(number)

    async def check_health(self) -> None:
        """Raise the error of a failed step; none follows it."""
        if self._failure is not None:
            raise self._failure

    async def is_paused(self) -> bool:
        """Return whether it is paused; runs between two steps."""
        return self._pauses["paused"]

    async def end(self) -> None:
        """Shut the engine down now: later it would destroy the process groups of the next engine in this process."""
        self._step_task.cancel()
        self._engine.engine_core.shutdown()
