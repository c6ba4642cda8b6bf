"""What we ask of vLLM, in its own words: an engine, its statistics, sampling parameters, a finished answer."""

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
from rl_bridge.titan.architecture import Architecture, read_architecture
from rl_bridge.types import Completion, PolicyVersion, SamplingSettings
from rl_bridge.weights.peft import write_adapter

if TYPE_CHECKING:
    from torch import Tensor

OWNER_VARIABLE = "ROPEWALK_ENGINE_OWNER"
"""Tells an engine's own process whose it is, by number."""
SEED_LIMIT = 2**63
"""Seeds are from 0 to below this: what PyTorch's generators take, less the negative ones; vLLM takes -1 for none."""
KV_BLOCK_TOKENS = 16
"""Tokens of a block of the key-value cache, as vLLM divides it on a GPU."""
MOST_KV_BLOCKS = 2**19
"""Blocks of a GPU's key-value cache, 8 million tokens, where the prompts at once need no more. vLLM makes an object of
each when it starts, in 1 to 3 microseconds and 100 bytes, and goes through all of them whenever the cache is cleared. A
policy of two layers would have thirty million on a large card: a minute of its start, and seconds of every sleep."""


@dataclass(slots=True)
class EngineTotals:
    """What an engine has counted since it began; travels between processes.

    Attributes:
        prompt_tokens: Tokens of prompts that were looked up in the prefix cache.
        cached_tokens: Those of them that were found there, and not computed again.
        generated_tokens: Tokens that were sampled.
        preemptions: Requests that lost their keys and values to others, and are computed anew.
        kv_cache_usage: The share of the key-value cache that is in use now.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    kv_cache_usage: float = 0.0


class EngineStatistics:
    """Replaces vLLM's stat loggers, and sums up their statistics.

    Attributes:
        totals: Since the engine began.
        last_token_at: When the last token was sampled, or the engine woke, on the clock of `time.monotonic`; 0 before.
        asleep: Whether the engine has been put to sleep.
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
        """Take the statistics of one step; vLLM calls this."""
        totals = self.totals
        if scheduler_stats is not None:
            totals.kv_cache_usage = scheduler_stats.kv_cache_usage
            totals.prompt_tokens += scheduler_stats.prefix_cache_stats.queries
            totals.cached_tokens += scheduler_stats.prefix_cache_stats.hits
        if iteration_stats is not None:
            totals.preemptions += iteration_stats.num_preempted_reqs
            if iteration_stats.num_generation_tokens:
                totals.generated_tokens += iteration_stats.num_generation_tokens
                self.last_token_at = time.monotonic()

    def record_sleep_state(self, sleep: int, level: int) -> None:
        """The engine sleeps (1) or has woken (0); vLLM calls this."""
        self.asleep, self.last_token_at = bool(sleep), time.monotonic()

    def log(self) -> None:
        """VLLM calls this now and then; there is nothing to print."""

    def seconds_without_token(self, since: float) -> float:
        """How long no token has been sampled, counted from a moment at the earliest; nobody expects one asleep."""
        return 0.0 if self.asleep else time.monotonic() - max(since, self.last_token_at)


def import_engine() -> None:
    """Import what `build_engine` needs, which takes long and no GPU; MissingDependencyError where it is not there."""
    # In this process nothing waits for another; and apart, on a CPU, the executor "uni" is overruled otherwise, and a
    # worker has yet another process, which would outlive its owner.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    try:
        import vllm
        import vllm.v1.engine.async_llm  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError("vllm") from error


def build_engine(
    config: Config, model_path: str, *, seed: int, statistics: EngineStatistics, apart: bool
) -> Any:
    """Load a `vllm.LLMEngine` in this process, as a `LocalEngine`; or, `apart` from it, vLLM's `AsyncLLM`.

    Blocks until it is loaded. It belongs to the event loop that runs here, and a process of its own to this thread,
    with which it ends. GeneratorError where it cannot start.
    """
    import_engine()
    import vllm
    from vllm.v1.engine.async_llm import AsyncLLM

    kind: Any = AsyncLLM if apart else vllm.LLMEngine
    arguments: Any = vllm.AsyncEngineArgs if apart else vllm.EngineArgs
    options, loader = _options(config, model_path, seed), "WeightLoader"
    if apart or config.generator.tensor_parallel > 1:  # or a process for each rank
        _own_processes()
        loader = "OwnedWeightLoader"
    if not apart and config.rollout.weight_update != "drain":
        # Or a step that the old weights have computed would be told of after the new ones came.
        options["async_scheduling"] = False
    try:
        with _modules_that_can_be_looked_at(), _semaphores_without_a_name():
            started = kind.from_engine_args(
                arguments(worker_extension_cls=f"rl_bridge.generator.vllm_worker.{loader}", **options)
            )
    except Exception as error:
        where = "; its process has told why in this generator's log, in logs/ of the run" if apart else ""
        raise GeneratorError(f"vLLM cannot start on {model_path!r}: {error}{where}") from error
    started.logger_manager.stat_loggers = [statistics]
    return started if apart else LocalEngine(started)


def _own_processes() -> None:
    """Have vLLM's processes begin so that they end with this one."""
    # Forked from a process with threads, as an actor's is, one might never start.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    os.environ[OWNER_VARIABLE] = str(os.getpid())


async def end_engine(engine: Any) -> None:
    """End an engine, and where it has a process of its own, that and the sockets to it; in its event loop."""
    if isinstance(engine, LocalEngine):
        await engine.end()
        return
    core = engine.engine_core
    engine.shutdown()
    # Where its process has died another thread has handed the sockets' closing to this loop.
    await asyncio.sleep(0)
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
    """Hide modules for the block that hold objects whose attributes must not be inspected.

    On a CPU vLLM looks for its kernels behind every name of every module, and gives up where one raises, as Flask's
    `request` does outside of a request. Who trains or evaluates may well have Flask: Monarch's dashboard is made of it.
    """
    # One of PyTorch's names warns whoever looks at it.
    warnings.filterwarnings("ignore", "`torch.distributed.reduce_op` is deprecated", FutureWarning)
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


def _options(config: Config, model_path: str, seed: int) -> dict[str, Any]:
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
        # Log-probabilities of the distribution that was sampled from, temperature included.
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": False,
        "seed": seed,
    }
    if on_gpu:
        options["gpu_memory_utilization"] = rollout.gpu_memory_utilization
        options["enable_sleep_mode"] = bool(config.monarch.colocate)
        if (kv_bytes := _small_kv_cache_bytes(config, model_path)) is not None:
            options["kv_cache_memory_bytes"] = kv_bytes
    else:
        options["kv_cache_memory_bytes"] = rollout.kv_cache_mb << 20
        # A seeded request whose prompt is split over steps crashes the engine on a CPU: vLLM turns back the
        # request's generator, which only those of GPUs can. So prompts are whole, and steps long enough.
        options["enable_chunked_prefill"] = False
        options["max_num_batched_tokens"] = max(8192, rollout.max_length, rollout.max_num_seqs)
    if (lora := config.pushed_adapter) is not None:
        from vllm.config.lora import MaxLoRARanks  # there are a few to choose from

        rank = next(rank for rank in get_args(MaxLoRARanks) if rank >= lora.rank)
        options |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank}
    if config.deterministic:
        # Kernels are chosen by shape: a row's result may depend on how many rows there are.
        options["enable_prefix_caching"] = False
    return options


def _small_kv_cache_bytes(config: Config, model_path: str) -> int | None:
    """The key-value cache of a model so small that its share of the GPU would be too many blocks; None of others."""
    from vllm.platforms import current_platform

    if os.environ.get("CUDA_VISIBLE_DEVICES", "").startswith("MIG-"):
        return None  # the driver tells the memory of the whole GPU, not of the part
    try:
        model = read_architecture(Path(model_path))
    except ModelError:
        return None  # vLLM knows more of them than we do
    share = config.rollout.gpu_memory_utilization * current_platform.get_device_total_memory()
    return small_kv_cache_bytes(config, model, round(share))


def small_kv_cache_bytes(config: Config, model: Architecture, share: int) -> int | None:
    """Bytes for `MOST_KV_BLOCKS` blocks, or for twice the prompts at once; None where that is not far below `share`.

    Far below, so that weights and activations of such a model have their room beside it.
    """
    rollout = config.rollout
    width = 4 if config.model.dtype == "float32" else 2
    heads = max(1, model.kv_heads // config.generator.tensor_parallel)
    block = KV_BLOCK_TOKENS * 2 * model.layers * heads * model.head_dim * width
    at_once = rollout.max_num_seqs * -(-rollout.max_length // KV_BLOCK_TOKENS)
    wanted = max(MOST_KV_BLOCKS, 2 * at_once) * block
    return wanted if 2 * wanted <= share else None


@contextmanager
def adapter_request(state: "Mapping[str, Tensor]", lora: LoraConfig, number: int) -> Iterator[Any]:
    """A `vllm.LoRARequest` of adapters under PEFT's names, whose files are there within the block; None of none.

    Its number, from 1, is one that no other adapter of the engine has had.
    """
    from vllm.lora.request import LoRARequest

    if not state:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="ropewalk-adapter-") as folder:
        write_adapter(Path(folder), state, lora, base="")
        yield LoRARequest(lora_name=f"adapter-{number}", lora_int_id=number, lora_path=folder)


def refusals() -> tuple[type[Exception], ...]:
    """What is raised at a request that is wrong; anything else means that the engine is."""
    from vllm.exceptions import VLLMClientError

    return (VLLMClientError, ValueError, TypeError, OverflowError)


def sampling_params(sampling: SamplingSettings, seeds: Sequence[int] | None, *, prompts: int) -> list[Any]:
    """One `vllm.SamplingParams` a prompt; raises ValueError for a seed or a setting out of range, or too few seeds."""
    if seeds is None:
        return [_sampling_params(sampling, None)] * prompts
    if len(seeds) != prompts or not all(map(_is_seed, seeds)):
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


def kept_from(rollout: RolloutConfig, version: PolicyVersion) -> PolicyVersion | None:
    """The weights that a prompt's keys and values may be of whatever is loaded later; None where they are not kept."""
    return version if rollout.weight_update == "keep_cache" else None


def prompt_of(tokens: Sequence[int], kept_from: PolicyVersion | None) -> dict[str, Any]:
    """A prompt as vLLM takes it. Where keys and values are kept it shares those of its own version's prompts alone."""
    salt = {} if kept_from is None else {"cache_salt": str(kept_from)}
    return {"type": "token", "prompt_token_ids": list(tokens), **salt}


def completion_of(answer: Any, *, kept_from: PolicyVersion | None = None) -> Completion:
    """The answer of a finished request, a `vllm.CompletionOutput`; GeneratorError where the engine gave up on it.

    With `kept_from`, as of its prompt, the first token is said to be of no later weights, so that no answer passes for
    younger than what it was computed from.
    """
    if answer.finish_reason not in ("stop", "length"):
        raise GeneratorError(
            f"expected the engine to finish an answer by stop or length, it did by {answer.finish_reason}"
        )
    logprobs = [at[token].logprob for token, at in zip(answer.token_ids, answer.logprobs, strict=True)]
    if not all(
        map(math.isfinite, logprobs)
    ):  # no loss could be made of them, nor of a checkpoint that has them
        raise GeneratorError(
            f"expected the engine to sample tokens with a finite log-probability, got {logprobs!r:.200}; where that "
            "goes on, its weights or its kernels are broken"
        )
    versions = [int(span.version) for span in answer.weight_versions for _ in range(span.start, span.end)]
    if kept_from is not None:
        versions[:1] = [min(version, kept_from) for version in versions[:1]]
    return Completion(
        tokens=list(answer.token_ids),
        logprobs=logprobs,
        versions=versions,
        stopped=answer.finish_reason == "stop",
    )


ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""For a role's environment: roles take turns, and idle OpenMP threads that spin cost more than they compute."""


def engine_environment(*, on_gpu: bool) -> dict[str, str]:
    """The variables that the engine's process begins with; vLLM reads them when it is imported."""
    # On a GPU a start takes minutes, and vLLM's own lines are all that tells how far it is, and what a turn takes.
    level = os.environ.get("VLLM_LOGGING_LEVEL") or ("INFO" if on_gpu else "WARNING")
    environment = {**ONE_THREAD, "VLLM_LOGGING_LEVEL": level, "VLLM_NO_USAGE_STATS": "1"}
    if not on_gpu:
        # Compilation takes longer than it saves on models that fit a CPU.
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}
    return environment
