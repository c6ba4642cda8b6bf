"""What we ask of vLLM, in its own words: an engine, sampling parameters, a finished answer."""

import asyncio
import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral
from types import ModuleType
from typing import Any

from rl_bridge.errors import GeneratorError, MissingDependencyError
from rl_bridge.generator.settings import EngineSettings
from rl_bridge.types import Completion, SamplingSettings

OWNER_VARIABLE = "ROPEWALK_ENGINE_OWNER"
"""Tells an engine's own process whose it is, by number."""
SEED_LIMIT = 2**63
"""Seeds are from 0 to below this: what PyTorch's generators take, less the negative ones; vLLM takes -1 for none."""


def build_engine(settings: EngineSettings) -> Any:
    """Load a `vllm.LLMEngine` in this process.

    Raises:
        MissingDependencyError: vLLM is not installed.
        GeneratorError: It cannot start.
    """
    # The engine-core process that vLLM would start otherwise is not needed: our thread waits for nothing else.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    try:
        from vllm import EngineArgs, LLMEngine
    except ImportError as error:
        raise MissingDependencyError("vllm") from error
    options = _options(settings)
    if settings.weight_update == "continue":
        # Or a step that the old weights have computed would be told of after the new ones came.
        options["async_scheduling"] = False
    try:
        with _semaphores_without_a_name(), _modules_that_can_be_looked_at():
            return LLMEngine.from_engine_args(
                EngineArgs(worker_extension_cls="rl_bridge.generator.vllm_worker.WeightLoader", **options)
            )
    except Exception as error:
        raise GeneratorError(f"vLLM cannot start on {settings.model_path!r}: {error}") from error


def build_async_engine(settings: EngineSettings) -> Any:
    """Start a `vllm.v1.engine.async_llm.AsyncLLM`, whose engine has a process of its own. Blocks until it is loaded.

    It belongs to the event loop that runs here, and its process to this thread: it ends when the thread does.

    Raises:
        MissingDependencyError: vLLM is not installed.
        GeneratorError: It cannot start.
    """
    # Forked from a process with threads, as an actor's is, it might never start.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    # Or on a CPU the executor "uni" is overruled, and a worker has yet another process, which would outlive its owner.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ[OWNER_VARIABLE] = str(os.getpid())
    try:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM
    except ImportError as error:
        raise MissingDependencyError("vllm") from error
    try:
        with _semaphores_without_a_name():
            return AsyncLLM.from_engine_args(
                AsyncEngineArgs(
                    worker_extension_cls="rl_bridge.generator.vllm_process.OwnedWeightLoader",
                    **_options(settings),
                )
            )
    except Exception as error:
        raise GeneratorError(f"vLLM cannot start on {settings.model_path!r}: {error}") from error


async def end_async_engine(engine: Any) -> None:
    """End what `build_async_engine` has started, its process and the sockets to that; in its event loop."""
    core = engine.engine_core
    engine.shutdown()
    await asyncio.sleep(
        0
    )  # where its process has died another thread has handed the sockets' closing to this loop
    # vLLM closes its sockets, and leaves their context, which has threads, to the garbage collector. A context waits
    # for its sockets for ever, so one that would have to stays as it is.
    if all(socket.closed for socket in core.ctx._sockets):
        core.resources.ctx.term()


@contextmanager
def _semaphores_without_a_name() -> Iterator[None]:
    """Have whatever is loaded make its locks between processes so that they leave nothing when this one is killed.

    Where new processes are not forked, and Monarch has them spawned, a semaphore has a name in /dev/shm for as long as
    it is there. vLLM's executor makes one, and the progress bar of its loader, which nobody shares.
    """
    chosen = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("fork", force=True)
    try:
        yield
    finally:
        multiprocessing.set_start_method(chosen, force=True)


@contextmanager
def _modules_that_can_be_looked_at() -> Iterator[None]:
    """Hide the modules meanwhile that hold something which must not be asked what it is.

    On a CPU vLLM looks for its kernels behind every name of every module, and gives up where one raises, as Flask's
    `request` does outside of a request. Who trains or evaluates may well have Flask: Monarch's dashboard is made of it.
    """
    hidden = {name: module for name, module in list(sys.modules.items()) if not _can_be_looked_at(module)}
    for name in hidden:
        del sys.modules[name]
    try:
        yield
    finally:
        sys.modules.update(hidden)


def _can_be_looked_at(module: ModuleType) -> bool:
    for value in list(getattr(module, "__dict__", {}).values()):
        try:
            hasattr(value, "__dict__")
        except Exception:  # whatever it is, vLLM does not expect it
            return False
    return True


def _options(settings: EngineSettings) -> dict[str, Any]:
    from rl_bridge.devices import own_device

    on_gpu = own_device().type == "cuda"
    options: dict[str, Any] = {
        "model": settings.model_path,
        "skip_tokenizer_init": True,  # tokens in, tokens out
        "dtype": settings.dtype,
        "enforce_eager": not on_gpu,
        "max_model_len": settings.max_length,
        "max_num_seqs": 1 if settings.deterministic else settings.max_num_seqs,
        "distributed_executor_backend": "uni",
        # Log-probabilities of the distribution that was sampled from, temperature included.
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "seed": settings.seed,
    }
    if on_gpu:
        options["gpu_memory_utilization"] = settings.gpu_memory_utilization
    else:
        options["kv_cache_memory_bytes"] = settings.kv_cache_bytes
        # A seeded request whose prompt is split over steps crashes the engine on a CPU: vLLM turns back the
        # request's generator, which only those of GPUs can. So prompts are whole, and steps long enough.
        options["enable_chunked_prefill"] = False
        options["max_num_batched_tokens"] = max(8192, settings.max_length, settings.max_num_seqs)
    if settings.deterministic:
        # Kernels are chosen by shape: a row's result may depend on how many rows there are.
        options["enable_prefix_caching"] = False
    return options


def refusals() -> tuple[type[Exception], ...]:
    """What is raised at a request that is wrong; anything else means that the engine is."""
    from vllm.exceptions import VLLMClientError

    return (VLLMClientError, ValueError, TypeError, OverflowError)


def sampling_params(sampling: SamplingSettings, seeds: Sequence[int] | None, *, prompts: int) -> list[Any]:
    """One `vllm.SamplingParams` a prompt; without seeds they draw from the engine's own generator.

    Raises:
        ValueError: A seed or a setting is out of range, or there are more or fewer seeds than prompts.
    """
    if seeds is None:
        return [_sampling_params(sampling, None)] * prompts
    if len(seeds) != prompts or not all(_is_seed(seed) for seed in seeds):
        raise ValueError(f"expected {prompts} seeds from 0 to {SEED_LIMIT - 1}, got {seeds!r}")
    return [_sampling_params(sampling, int(seed)) for seed in seeds]


def _is_seed(value: object) -> bool:
    return isinstance(value, Integral) and 0 <= int(value) < SEED_LIMIT


def _sampling_params(sampling: SamplingSettings, seed: int | None) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=sampling.temperature,
        max_tokens=sampling.max_new_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        seed=seed,
        logprobs=0,  # of the sampled token alone
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def completion_of(answer: Any) -> Completion:
    """The answer of a finished request, a `vllm.CompletionOutput`.

    Raises:
        GeneratorError: The engine gave up on it.
    """
    if answer.finish_reason not in ("stop", "length"):
        raise GeneratorError(
            f"expected the engine to finish an answer by stop or length, it did by {answer.finish_reason}"
        )
    versions = [int(span.version) for span in answer.weight_versions for _ in range(span.start, span.end)]
    return Completion(
        tokens=list(answer.token_ids),
        logprobs=[at[token].logprob for token, at in zip(answer.token_ids, answer.logprobs, strict=True)],
        versions=versions,
        stopped=answer.finish_reason == "stop",
    )
