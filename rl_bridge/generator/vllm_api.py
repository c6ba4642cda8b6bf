"""What we ask of vLLM, in its own words: an engine, sampling parameters, a finished answer."""

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import Any

from rl_bridge.errors import GeneratorError, MissingStack
from rl_bridge.generator.settings import EngineSettings
from rl_bridge.types import Completion, SamplingSettings

SEED_LIMIT = 2**63
"""Seeds are from 0 to below this: what PyTorch's generators take, less the negative ones; vLLM takes -1 for none."""


def build_engine(settings: EngineSettings) -> Any:
    """Load a `vllm.LLMEngine` in this process.

    Raises:
        MissingStack: vLLM is not installed.
        GeneratorError: It cannot start.
    """
    import torch

    on_gpu = torch.cuda.is_available()
    # The engine-core process that vLLM would start otherwise is orphaned when an actor is killed.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    try:
        from vllm import EngineArgs, LLMEngine
    except ImportError as error:
        raise MissingStack("vllm") from error
    options: dict[str, Any] = {}
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
    if settings.weight_update == "continue":
        # Or a step that the old weights have computed would be told of after the new ones came.
        options["async_scheduling"] = False
    try:
        with _semaphores_without_a_name():
            return LLMEngine.from_engine_args(
                EngineArgs(
                    model=settings.model_path,
                    skip_tokenizer_init=True,  # tokens in, tokens out
                    dtype=settings.dtype,
                    enforce_eager=not on_gpu,
                    max_model_len=settings.max_length,
                    max_num_seqs=1 if settings.deterministic else settings.max_num_seqs,
                    distributed_executor_backend="uni",
                    worker_extension_cls="rl_bridge.generator.vllm_worker.WeightLoader",
                    # Log-probabilities of the distribution that was sampled from, temperature included.
                    logprobs_mode="processed_logprobs",
                    disable_log_stats=True,
                    seed=settings.seed,
                    **options,
                )
            )
    except Exception as error:
        raise GeneratorError(f"vLLM cannot start on {settings.model_path!r}: {error}") from error


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
    """The answer of a finished request, a `vllm.CompletionOutput`."""
    versions = [int(span.version) for span in answer.weight_versions for _ in range(span.start, span.end)]
    return Completion(
        tokens=list(answer.token_ids),
        logprobs=[at[token].logprob for token, at in zip(answer.token_ids, answer.logprobs, strict=True)],
        versions=versions,
        stopped=answer.finish_reason == "stop",
    )
