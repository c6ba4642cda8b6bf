"""The trainer, with one rank per process, and the reference policy as Monarch actors."""

import asyncio
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from monarch.actor import concurrent_endpoint, context
from numpy.typing import NDArray

from rl_bridge.buffer.batch import TrainBatch
from rl_bridge.buffer.stored import StoredBatch, TokenStore, make_samples
from rl_bridge.errors import BridgeError, MissingDependencyError, RankLostError, TrainingError
from rl_bridge.metrics.spans import PROCESS_SPANS, log_phase, span
from rl_bridge.services.actor import ServiceActor
from rl_bridge.services.handle import Roster, ServiceHandle
from rl_bridge.services.own_process import GpuLock
from rl_bridge.titan.ranks import SINGLE_RANK, Rank
from rl_bridge.tokens.arrays import TokenKey, TrajectoryTokens, dump_tokens
from rl_bridge.trainer.passes import RankBatch, reference_logprobs
from rl_bridge.trainer.settings import ResumeState, TrainerSettings
from rl_bridge.types import PolicyVersion
from rl_bridge.weights import WeightStore

# Imports TorchTitan, which only the actors' own processes need: the controller imports this module before they start.
if TYPE_CHECKING:
    from rl_bridge.trainer.reference import Reference

T = TypeVar("T")

EXIT_OUT_OF_SYNC = 3
"""Exit status of a rank that can no longer work with its siblings."""
TOKENS = "tokens"
"""The attachment of a checkpoint with the tokens of finished groups."""


async def _import(module: str) -> None:
    try:
        await asyncio.to_thread(import_module, module)
    except ImportError as error:
        raise MissingDependencyError.of_import(error) from error


class TrainerActor(ServiceActor):
    """A thin shell around `Trainer`: one replica, with one rank per process.

    The first rank keeps the tokens of played groups, makes a step's batch of them, and sends each rank its part.

    A thread does the work, one call at a time, in the order of the calls. Only a push runs concurrently: the next
    step's forward and backward passes do not wait for it, but its update does.

    A rank whose siblings are gone ends its process, and so does one of several ranks that meets an error other than a
    BridgeError: the process group cannot be repaired, and the service restarts all ranks. A BridgeError, and any error
    of a single rank, is raised to the caller.
    """

    REPLAYED = ("take_reference",)

    def __init__(self, settings: TrainerSettings, store: WeightStore | None = None) -> None:
        self._settings = settings
        self._store = store
        self._tokens = TokenStore()
        self._reference: ServiceHandle | None = None
        self._rank = SINGLE_RANK
        self._thread = ThreadPoolExecutor(1, "trainer")
        self._saving = asyncio.Lock()
        self._gpu_lock = GpuLock() if settings.config.monarch.colocate else None

    @concurrent_endpoint
    async def setup(self) -> None:
        """Join the other ranks, then load the model and the run's newest checkpoint, if any."""
        self._rank = _make_rank(self._settings)
        with log_phase("importing the trainer"):
            await _import("rl_bridge.trainer.trainer")
        if self._gpu_lock is not None:
            with log_phase("waiting for a turn on the GPU"):
                await self._gpu_lock.acquire(self._settings.config.trainer.timeout_s)
        with log_phase("loading the model"):
            await self._run_on_thread("start", self._start)
        if self._gpu_lock is not None:
            with log_phase("leaving the GPU to the generators"):
                await self._release_gpu()
        PROCESS_SPANS.rest("batches")

    @concurrent_endpoint
    async def get_resume_state(self) -> ResumeState:
        """Return the state of the checkpoint that this start of the trainer resumed from, and keep its tokens alone."""
        resumed = self._resume_state
        if self._rank.index == 0 and (tokens := resumed.attachments.get(TOKENS)) is not None:
            self._tokens.load(tokens)
        return replace(resumed, attachments={})

    @concurrent_endpoint
    async def take_reference(self, roster: Roster) -> None:
        """Use these replicas of the reference from now on."""
        if self._reference is None:
            self._reference = ServiceHandle(roster)
        else:
            self._reference.update(roster)

    @concurrent_endpoint
    async def put_tokens(self, tokens: Mapping[TokenKey, TrajectoryTokens]) -> None:
        """Keep the tokens of trajectories; workers call it on the first rank alone."""
        self._tokens.put(tokens)

    @concurrent_endpoint
    async def get_tokens(self, keys: Sequence[TokenKey]) -> list[TrajectoryTokens]:
        """Return the tokens of trajectories that are not trained yet, or were in the last step."""
        return self._tokens.get(keys) if self._rank.index == 0 else []

    @concurrent_endpoint
    async def checkpointing(self) -> str:
        """Return the activation checkpointing that the trainer uses, and why. See `Trainer.checkpointing`."""
        return self._trainer.checkpointing

    @concurrent_endpoint
    async def train_step(
        self, batch: TrainBatch | StoredBatch, version: PolicyVersion | None = None
    ) -> dict[str, float]:
        """Train one iteration from a version; returns its metrics and measurements. See `Trainer.step`."""
        # Before the GPU's turn, in which a colocated reference could not compute.
        part = await self._receive_part(batch) if isinstance(batch, StoredBatch) else batch
        await self._acquire_gpu()
        return await self._run_on_thread(
            "train", lambda: self._trainer.step(part, version) | self._trainer.measured
        )

    async def _receive_part(self, batch: StoredBatch) -> RankBatch:
        """Return this rank's part of a batch, which the first rank makes."""
        parts: list[RankBatch] | BridgeError | None = None
        if self._rank.index == 0:
            try:
                parts = await self._make_parts(batch)
            except BridgeError as error:
                parts = error  # for all ranks
        return await self._run_on_thread("receive", self._trainer.receive, parts)

    async def _make_parts(self, batch: StoredBatch) -> list[RankBatch]:
        tokens = self._tokens.take(batch)
        whole = await self._run_on_thread(
            "batch", lambda: TrainBatch.from_samples(make_samples(batch, tokens))
        )
        if self._reference is not None:
            with PROCESS_SPANS.call(), span("reference", waits_for="reference"):
                logprobs = await reference_logprobs(self._reference, whole, self._settings)
            whole = whole.with_reference(logprobs)
        return await self._run_on_thread("batch", self._trainer.divide, whole)

    @concurrent_endpoint
    async def push_weights(self, version: PolicyVersion) -> float:
        """Put this rank's part of the weights into the store, in the dtype that the model computes in.

        Returns the duration in seconds. If called before the next `train_step`, it runs concurrently with that; the
        step's metric `time/push_blocked_s` is how long its updates had to wait for the push.
        """
        if self._store is None:
            raise TrainingError("expected a trainer with a store of weights, got one without")
        await self._acquire_gpu()
        started_at = time.perf_counter()
        with ExitStack() as stack:
            state = await self._run_on_thread(
                "hold weights", stack.enter_context, self._trainer.weights(version)
            )
            with span("push"):
                await self._store.put(
                    version,
                    state,
                    rank=self._rank.index,
                    ranks=self._rank.count,
                    dtype=getattr(torch, self._settings.config.model.dtype),  # generators compute in it
                )
        return time.perf_counter() - started_at

    @concurrent_endpoint
    async def save_checkpoint(
        self,
        version: PolicyVersion,
        run_state: Mapping[str, Any],
        tokens: Sequence[TokenKey] = (),
        wait: bool = True,
    ) -> None:
        """Write a checkpoint, with the tokens of the trajectories with these keys. See `Trainer.save`."""
        attachments: dict[str, bytes] = {}
        if self._rank.index == 0:
            kept = dict(zip(tokens, self._tokens.get(tokens), strict=True))
            attachments[TOKENS] = await asyncio.to_thread(dump_tokens, kept)
        async with self._saving:
            await self._acquire_gpu()
            save = partial(self._trainer.save, wait=wait)
            await self._run_on_thread("save", save, version, run_state, attachments)

    @concurrent_endpoint
    async def wait_for_checkpoint(self) -> None:
        """Wait until the checkpoint in progress is written or has failed, whatever else the trainer does meanwhile."""
        async with self._saving:
            pass
        await asyncio.to_thread(self._trainer.wait_for_checkpoint)

    @concurrent_endpoint
    async def export(self, folder: str, version: PolicyVersion) -> None:
        """Write the weights of a version, which must be the trainer's current one, as safetensors into a folder."""
        await self._acquire_gpu()
        await self._run_on_thread("export", self._trainer.export, folder, version)

    @concurrent_endpoint
    async def release_gpu(self) -> None:
        """Free the GPU for the generators until the next call that needs it; they must sleep by then."""
        await self._release_gpu()

    async def _release_gpu(self) -> None:
        if self._gpu_lock is not None and self._gpu_lock.held:
            await self._run_on_thread("offload", self._trainer.offload)
            self._gpu_lock.release()

    async def _acquire_gpu(self) -> None:
        if self._gpu_lock is not None:
            await self._gpu_lock.acquire(self._settings.config.trainer.timeout_s)
            await self._run_on_thread("onload", self._trainer.onload)

    @concurrent_endpoint
    async def close(self) -> None:
        """Finish the work in progress, and stop."""
        await self._run_on_thread("close", self._trainer.close)
        if self._store is not None:
            await self._store.close()

    async def _run_on_thread(self, label: str, call: Callable[..., T], *args: Any) -> T:
        def timed_call() -> T:
            with span(label):
                return call(*args)

        try:
            with PROCESS_SPANS.call():
                return await asyncio.get_running_loop().run_in_executor(self._thread, timed_call)
        except Exception as error:
            _exit_if_out_of_step(error, self._rank)
            raise

    def _start(self) -> None:
        from rl_bridge.trainer.trainer import Trainer

        self._trainer = Trainer(self._settings, self._rank)
        self._resume_state = self._trainer.resume()


def _make_rank(settings: TrainerSettings) -> Rank:
    """Return the rank of this actor among the processes of its replica."""
    instance, folder = context().actor_instance, Path(settings.folder)
    folder.mkdir(parents=True, exist_ok=True)
    return Rank(
        index=instance.rank.rank,
        count=instance.rank.extent.nelements,
        # The actor's name is unique to each start of a replica, and its ranks share it.
        rendezvous_file=folder / f".meeting-{instance.name}",
        timeout_s=settings.config.trainer.collective_timeout_s,
    )


def _exit_if_out_of_step(error: Exception, rank: Rank) -> None:
    """End the process if it is one of several ranks and the error is its own: the others would wait for it."""
    if rank.count > 1 and (isinstance(error, RankLostError) or not isinstance(error, BridgeError)):
        traceback.print_exception(error)
        sys.stderr.flush()
        os._exit(EXIT_OUT_OF_SYNC)


class ReferenceActor(ServiceActor):
    """A thin shell around `Reference`, with one rank per process, which computes one batch at a time on a thread.

    A rank whose siblings are gone, or that fails alone, ends its process, as the trainer's do.

    If it shares a GPU with trainer and generators, it takes a turn for each batch and loads the model in the first one:
    at a start or restart, others may hold the turn for a long time.
    """

    REPEATABLE = frozenset({"logprobs"})

    def __init__(self, settings: TrainerSettings) -> None:
        self._settings = settings
        self._reference: Reference | None = None
        self._rank = SINGLE_RANK
        self._gpu_lock = GpuLock() if settings.config.monarch.colocate else None
        self._compute_lock = asyncio.Lock()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reference")

    @concurrent_endpoint
    async def setup(self) -> None:
        """Join the replica's other ranks, and load the model, unless that needs a turn on the GPU."""
        self._rank = _make_rank(self._settings)
        await _import("rl_bridge.trainer.reference")
        if self._gpu_lock is None:
            await self._run_on_thread(self._load)
        PROCESS_SPANS.rest("batches")

    @concurrent_endpoint
    async def logprobs(self, batch: TrainBatch) -> NDArray[np.float32]:
        """Return the log-probability of each loss token, shape [T]."""
        async with self._compute_lock:
            if self._gpu_lock is not None:
                await self._gpu_lock.acquire(self._settings.config.trainer.timeout_s)
            try:
                return await self._run_on_thread(self._logprobs, batch)
            finally:
                if self._gpu_lock is not None:
                    self._gpu_lock.release()

    @concurrent_endpoint
    async def close(self) -> None:
        """Stop the thread after its current work."""
        await asyncio.to_thread(self._thread.shutdown)

    async def _run_on_thread(self, call: Callable[..., T], *args: Any) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, partial(call, *args))
        except Exception as error:
            _exit_if_out_of_step(error, self._rank)
            raise

    def _load(self) -> "Reference":
        from rl_bridge.trainer.reference import Reference

        with span("start"):
            self._reference = Reference(self._settings, self._rank)
            return self._reference

    def _logprobs(self, batch: TrainBatch) -> NDArray[np.float32]:
        reference = self._reference or self._load()
        with span("logprobs"):
            try:
                return reference.logprobs(batch)
            finally:
                if self._gpu_lock is not None:
                    reference.offload()
