"""The interface to vLLM: building an engine, its statistics, sampling parameters and finished requests."""

import asyncio
import math
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, get_args

from rl_bridge.config import Config, LoraConfig, RolloutConfig
from rl_bridge.errors import GeneratorError, MissingDependencyError, ModelError
from rl_bridge.generator.local_engine import LocalEngine
from rl_bridge.planning import ModelSize, in_transit_on_gpu, sent_bytes
from rl_bridge.titan.architecture import Architecture, read_architecture
from rl_bridge.types import Completion, PolicyVersion, SamplingSettings
from rl_bridge.weights.peft import write_adapter

if TYPE_CHECKING:
    from torch import Tensor

OWNER_VARIABLE = "ROPEWALK_ENGINE_OWNER"
"""The variable that tells an engine's own process the id of the process that owns it."""
SEED_LIMIT = 2**63
"""Seeds are from 0 to below this: those of PyTorch's generators without negative ones, as vLLM's -1 means no seed."""
KV_BLOCK_TOKENS = 16
"""The number of tokens in a block of vLLM's key-value cache on a GPU."""
MAX_KV_BLOCKS = 2**19
"""The most blocks of a GPU's key-value cache, 8 million tokens, unless concurrent prompts need more. vLLM makes an
object of each when it starts, at 1 to 3 microseconds and 100 bytes, and visits all of them whenever the cache is
cleared. A policy of two layers would have thirty million on a large GPU: a minute of its start, and seconds of every
sleep."""

MAX_ADAPTERS = 8
"""The most adapters in an engine, which reserves memory for each; new ones wait until an old one is unused."""


@dataclass(slots=True)
class EngineTotals:
    """An engine's totals since it started; they are sent between processes.

    Attributes:
        prompt_tokens: Prompt tokens that were looked up in the prefix cache.
        cached_tokens: Prompt tokens that were found there, and not computed again.
        generated_tokens: Tokens that were sampled.
        preemptions: Requests that lost their keys and values to others, and were recomputed.
        kv_cache_usage: The share of the key-value cache that is in use now.
        running: Requests that are computed now.
        waiting: Requests that wait for that now.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    kv_cache_usage: float = 0.0
    running: int = 0
    waiting: int = 0


class EngineStatistics:
    """Replaces vLLM's stat loggers, and sums up their statistics.

    Attributes:
        totals: The totals since the engine started.
        last_token_at: When the last token was sampled or the engine last fell asleep or woke, in seconds of
            `time.monotonic`; 0 before.
        asleep: Whether the engine is asleep.
    """

    def __init__(self) -> None:
        self.totals = EngineTotals()
        self.last_token_at = 0.0
        self.asleep = False

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Add the statistics of one step; vLLM calls this."""
        totals = self.totals
        if scheduler_stats is not None:
            totals.kv_cache_usage = scheduler_stats.kv_cache_usage
            totals.running = scheduler_stats.num_running_reqs
            totals.waiting = scheduler_stats.num_waiting_reqs
            totals.prompt_tokens += scheduler_stats.prefix_cache_stats.queries
            totals.cached_tokens += scheduler_stats.prefix_cache_stats.hits
        if iteration_stats is not None:
            totals.preemptions += iteration_stats.num_preempted_reqs
            if iteration_stats.num_generation_tokens:
                totals.generated_tokens += iteration_stats.num_generation_tokens
                self.last_token_at = time.monotonic()

    def record_sleep_state(self, sleep: int, level: int) -> None:
        """Record that the engine sleeps (1) or has woken (0); vLLM calls this."""
        self.asleep, self.last_token_at = bool(sleep), time.monotonic()

    def log(self) -> None:
        """Do nothing; vLLM calls this periodically."""

    def seconds_without_token(self, since: float) -> float:
        """Return the seconds without a token, counted from `since` at the earliest; 0 while the engine sleeps."""
        return 0.0 if self.asleep else time.monotonic() - max(since, self.last_token_at)


def import_engine() -> None:
    """Import vLLM, which takes long but needs no GPU; MissingDependencyError if that fails."""
    # An engine in this process needs no other one. For an engine apart, on a CPU, vLLM would otherwise override the
    # executor "uni" and start yet another process for the worker, which would outlive its owner.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    try:
        import vllm
        import vllm.v1.engine.async_llm  # noqa: F401
    except Exception as error:  # a package that does not match another raises anything
        raise MissingDependencyError.of_import(error) from error


def build_engine(
    config: Config, model_path: str, *, seed: int, statistics: EngineStatistics, own_process: bool
) -> Any:
    """Load a `vllm.LLMEngine` in this process, as a `LocalEngine`, or with `own_process` an `AsyncLLM` in another one.

    Blocks until it is loaded. The engine is bound to the running event loop; a process of its own ends with this
    thread. Raises GeneratorError if the engine cannot start.
    """
    import_engine()
    import vllm
    from vllm.v1.engine.async_llm import AsyncLLM

    kind: Any = AsyncLLM if own_process else vllm.LLMEngine
    arguments: Any = vllm.AsyncEngineArgs if own_process else vllm.EngineArgs
    options, loader = _make_engine_options(config, model_path, seed), "WeightLoader"
    if own_process or config.generator.tensor_parallel > 1:  # the latter has a process for each rank
        _prepare_owned_processes()
        loader = "OwnedWeightLoader"
    if not own_process and config.rollout.weight_update != "drain":
        # Otherwise a step computed by the old weights would be reported after the new ones are loaded.
        options["async_scheduling"] = False
    try:
        with _hide_uninspectable_modules(), _use_unnamed_semaphores():
            engine = kind.from_engine_args(
                arguments(worker_extension_cls=f"rl_bridge.generator.vllm_worker.{loader}", **options)
            )
    except Exception as error:
        where = "; the reason is in this generator's log, in the run's logs/" if own_process else ""
        raise GeneratorError(f"vLLM cannot start on {model_path!r}: {error}{where}") from error
    engine.logger_manager.stat_loggers = [statistics]
    return engine if own_process else LocalEngine(engine)


def _prepare_owned_processes() -> None:
    """Have vLLM start its processes such that they end with this one."""
    # A process forked from one with threads, such as an actor's, may deadlock before it starts.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    os.environ[OWNER_VARIABLE] = str(os.getpid())


async def end_engine(engine: Any) -> None:
    """End an engine, with its own process and the sockets to it, if any; call it on the engine's event loop."""
    if isinstance(engine, LocalEngine):
        await engine.end()
        return
    core = engine.engine_core
    engine.shutdown()
    # If its process has died, another thread has scheduled the closing of the sockets on this loop.
    await asyncio.sleep(0)
    # vLLM closes its sockets but leaves their context, which has threads, to the garbage collector. `term` waits for
    # all sockets for ever, so a context with open sockets is left alone.
    if all(socket.closed for socket in core.ctx._sockets):
        core.resources.ctx.term()


@contextmanager
def _use_unnamed_semaphores() -> Iterator[None]:
    """Have semaphores made within the block leave nothing behind when this process is killed.

    Under the start method "spawn", which Monarch sets, a semaphore has a name in /dev/shm as long as it exists; under
    "fork" it has none. vLLM's executor and its loader's progress bar make semaphores that no other process uses.
    """
    previous_method = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("fork", force=True)
    try:
        yield
    finally:
        multiprocessing.set_start_method(previous_method, force=True)


@contextmanager
def _hide_uninspectable_modules() -> Iterator[None]:
    """Hide modules with objects whose attributes cannot be inspected from vLLM within the block.

    On a CPU vLLM inspects every name of every module for its kernels, and fails if one raises, as Flask's `request`
    does outside of a request. Flask is often imported: Monarch's dashboard uses it.
    """
    # One of PyTorch's names warns on access.
    warnings.filterwarnings("ignore", "`torch.distributed.reduce_op` is deprecated", FutureWarning)
    hidden = {name: module for name, module in list(sys.modules.items()) if not _is_inspectable(module)}
    for name in hidden:
        del sys.modules[name]
    try:
        yield
    finally:
        sys.modules.update(hidden)


def _is_inspectable(module: ModuleType) -> bool:
    for value in list(getattr(module, "__dict__", {}).values()):
        try:
            hasattr(value, "__dict__")
        except Exception:  # vLLM does not expect any
            return False
    return True


def _make_engine_options(config: Config, model_path: str, seed: int) -> dict[str, Any]:
    from rl_bridge.devices import own_device

    rollout, on_gpu = config.rollout, own_device().type == "cuda"
    options: dict[str, Any] = {
        "model": model_path,
        "skip_tokenizer_init": True,  # tokens in, tokens out
        "dtype": config.model.dtype,
        "enforce_eager": not on_gpu,
        "max_model_len": rollout.max_length,
        "max_num_seqs": 1 if config.deterministic else rollout.max_num_seqs,
        "tensor_parallel_size": config.generator.tensor_parallel,
        "distributed_executor_backend": "uni" if config.generator.tensor_parallel == 1 else "mp",
        # Log-probabilities are of the distribution sampled from, temperature included.
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": False,
        "seed": seed,
    }
    if on_gpu:
        options["gpu_memory_utilization"] = rollout.gpu_memory_utilization - _kept_share(config, model_path)
        options["enable_sleep_mode"] = bool(config.monarch.colocate)
        if (kv_bytes := _small_kv_cache_bytes(config, model_path)) is not None:
            options["kv_cache_memory_bytes"] = kv_bytes
    else:
        options["kv_cache_memory_bytes"] = rollout.kv_cache_mb << 20
        # The smallest that vLLM's kernel allows. Only whole blocks of a prompt are reused, and with vLLM's own 128
        # tokens few prompts on a CPU have one.
        options["block_size"] = 32
        # A seeded request whose prompt is split over steps crashes the engine on a CPU: vLLM rewinds the request's
        # generator, which only GPU generators support. So prompts are not split, and steps are long enough for them.
        options["enable_chunked_prefill"] = False
        options["max_num_batched_tokens"] = max(8192, rollout.max_length, rollout.max_num_seqs)
    if (lora := config.pushed_adapter) is not None:
        from vllm.config.lora import MaxLoRARanks  # the few ranks that vLLM allows

        rank = next(rank for rank in get_args(MaxLoRARanks) if rank >= lora.rank)
        options |= {"enable_lora": True, "max_loras": max_adapters(rollout), "max_lora_rank": rank}
    if config.deterministic:
        # Kernels are chosen by shape, so a row's result may depend on the number of rows.
        options["enable_prefix_caching"] = False
    return options | config.generator.options


def _kept_share(config: Config, model_path: str) -> float:
    """Return the share of a GPU that the trainer's versions of the weights take there, awake or not (`cuda_ipc`)."""
    from vllm.platforms import current_platform

    if config.monarch.transport != "cuda_ipc":
        return 0.0
    sent = sent_bytes(ModelSize.of_folder(Path(model_path)), config)
    gpu_bytes: int = current_platform.get_device_total_memory()
    return sum(in_transit_on_gpu(config, sent).values()) / gpu_bytes


def _small_kv_cache_bytes(config: Config, model_path: str) -> int | None:
    """Return the bytes of the cache for a model so small that its share of the GPU is too many blocks, else None."""
    from vllm.platforms import current_platform

    if os.environ.get("CUDA_VISIBLE_DEVICES", "").startswith("MIG-"):
        return None  # the driver reports the memory of the whole GPU, not of the MIG instance
    try:
        model = read_architecture(Path(model_path))
    except ModelError:
        return None  # vLLM supports more architectures than the trainer
    share = config.rollout.gpu_memory_utilization * current_platform.get_device_total_memory()
    return small_kv_cache_bytes(config, model, round(share))


def small_kv_cache_bytes(config: Config, model: Architecture, share: int) -> int | None:
    """Return the bytes of `MAX_KV_BLOCKS` blocks, or of twice the concurrent prompts' if these are more.

    None unless that is at most half of `share`, which leaves room for such a model's weights and activations.
    """
    rollout = config.rollout
    width = 4 if config.model.dtype == "float32" else 2
    heads = max(1, model.kv_heads // config.generator.tensor_parallel)
    block = KV_BLOCK_TOKENS * 2 * model.layers * heads * model.head_dim * width
    concurrent_blocks = rollout.max_num_seqs * -(-rollout.max_length // KV_BLOCK_TOKENS)
    cache_bytes = max(MAX_KV_BLOCKS, 2 * concurrent_blocks) * block
    return cache_bytes if 2 * cache_bytes <= share else None


def max_adapters(rollout: RolloutConfig) -> int:
    """Return how many adapters an engine holds: of each version that answers in progress may have begun with."""
    return 1 if rollout.weight_update == "drain" else min(1 + rollout.max_staleness, MAX_ADAPTERS)


@contextmanager
def adapter_request(state: "Mapping[str, Tensor]", lora: LoraConfig, number: int) -> Iterator[Any]:
    """Make a `vllm.LoRARequest` of adapters under PEFT's names, with files that exist within the block.

    Yields None if `state` is empty. `number`, from 1, must be new among the engine's adapters.
    """
    from vllm.lora.request import LoRARequest

    if not state:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="ropewalk-adapter-") as folder:
        write_adapter(Path(folder), state, lora, base="")
        yield LoRARequest(lora_name=f"adapter-{number}", lora_int_id=number, lora_path=folder)


def request_error_types() -> tuple[type[Exception], ...]:
    """Return the exceptions that vLLM raises for an invalid request; any other means that the engine has failed."""
    from vllm.exceptions import VLLMClientError

    return (VLLMClientError, ValueError, TypeError, OverflowError)


def sampling_params(sampling: SamplingSettings, seeds: Sequence[int] | None, *, prompts: int) -> list[Any]:
    """Make a `vllm.SamplingParams` per prompt; ValueError for a seed or setting out of range, or too few seeds."""
    if seeds is None:
        return [_make_sampling_params(sampling, None)] * prompts
    if len(seeds) != prompts or not all(map(_is_seed, seeds)):
        raise ValueError(f"expected {prompts} seeds from 0 to {SEED_LIMIT - 1}, got {seeds!r}")
    return [_make_sampling_params(sampling, int(seed)) for seed in seeds]


def _is_seed(value: object) -> bool:
    return isinstance(value, Integral) and 0 <= int(value) < SEED_LIMIT


def _make_sampling_params(sampling: SamplingSettings, seed: int | None) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=sampling.temperature,
        max_tokens=sampling.max_new_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        seed=seed,
        logprobs=0,  # only the sampled token's
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def cache_version(rollout: RolloutConfig, version: PolicyVersion) -> PolicyVersion | None:
    """Return the version of a prompt's keys and values if they survive later weight updates, else None."""
    return version if rollout.weight_update == "keep_cache" else None


def prompt_of(tokens: Sequence[int], cache_version: PolicyVersion | None) -> dict[str, Any]:
    """Make vLLM's form of a prompt. If keys and values are kept, it shares only those of its own version's prompts."""
    salt = {} if cache_version is None else {"cache_salt": str(cache_version)}
    return {"type": "token", "prompt_token_ids": list(tokens), **salt}


def completion_of(
    answer: Any,
    *,
    cache_version: PolicyVersion | None = None,
    adapter_version: PolicyVersion | None = None,
) -> Completion:
    """Convert a finished request's `vllm.CompletionOutput`; GeneratorError if the engine aborted it.

    All tokens of a request with an adapter report its version: vLLM finishes an answer with the adapter that it began
    with.

    With its prompt's `cache_version`, the first token reports no later version than that, so that no completion counts
    as newer than the keys and values that it was computed from.
    """
    if answer.finish_reason not in ("stop", "length"):
        raise GeneratorError(
            f"expected the engine to finish an answer by stop or length, it did by {answer.finish_reason}"
        )
    logprobs = [
        by_token[token].logprob for token, by_token in zip(answer.token_ids, answer.logprobs, strict=True)
    ]
    if not all(map(math.isfinite, logprobs)):  # neither a loss nor a checkpoint can be made of others
        raise GeneratorError(
            f"expected the engine to sample tokens with a finite log-probability, got {logprobs!r:.200}; where that "
            "goes on, its weights or its kernels are broken"
        )
    versions = [int(span.version) for span in answer.weight_versions for _ in range(span.start, span.end)]
    if adapter_version is not None:
        versions = [adapter_version] * len(versions)
    if cache_version is not None:
        versions[:1] = [min(version, cache_version) for version in versions[:1]]
    return Completion(
        tokens=list(answer.token_ids),
        logprobs=logprobs,
        versions=versions,
        stopped=answer.finish_reason == "stop",
    )


ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""For a role's environment: roles take turns, and spinning idle OpenMP threads cost more than they gain."""


def engine_environment(*, on_gpu: bool) -> dict[str, str]:
    """Return the environment variables of the engine's process; vLLM reads them when it is imported."""
    # On a GPU a start takes minutes, and only vLLM's own log shows its progress and what the start spends time on.
    level = os.environ.get("VLLM_LOGGING_LEVEL") or ("INFO" if on_gpu else "WARNING")
    environment = {**ONE_THREAD, "VLLM_LOGGING_LEVEL": level, "VLLM_NO_USAGE_STATS": "1"}
    if not on_gpu:
        # Compilation takes longer than it saves on models that fit a CPU.
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}
    return environment
