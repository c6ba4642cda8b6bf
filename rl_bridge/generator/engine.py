"""vLLM's engine inside this process, on a thread of its own.

In-process on purpose: the engine has no child process that could be orphaned when its actor is killed, and
on a CPU it starts several times faster. Everything that touches the engine happens on one thread, in the
order in which it was asked for.
"""

import itertools
import os
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from rl_bridge.errors import GeneratorError, MissingStack
from rl_bridge.generator.settings import EngineSettings
from rl_bridge.types import Completion, PolicyVersion, SamplingSettings

MAX_WAITING_BATCHES = 64
"""Callers that could overrun this bound are a fault of ours, and are told so."""
STOP_TIMEOUT_S = 30.0


@dataclass(slots=True)
class _Generate:
    """One batch of prompts; done when every prompt is."""

    prompts: Sequence[Sequence[int]]
    sampling: SamplingSettings
    future: "Future[list[Completion]]" = field(default_factory=Future)
    completions: dict[int, Completion] = field(default_factory=dict)


@dataclass(slots=True)
class _Load:
    version: PolicyVersion
    state: dict[str, Tensor]
    future: "Future[None]" = field(default_factory=Future)


class VllmEngine:
    """A policy that answers batches of prompts, and takes new weights between them.

    Args:
        settings: What the engine is started with.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._inbox: queue.Queue[_Generate | _Load | None] = queue.Queue(MAX_WAITING_BATCHES)
        self._waiting: dict[str, tuple[_Generate, int]] = {}
        self._ids = itertools.count()
        self._version: PolicyVersion = 0
        self._ready: Future[None] = Future()
        self._failure: BaseException | None = None
        self._closed = False
        self._admission = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="vllm-engine", daemon=True)

    def start(self) -> "Future[None]":
        """Begin loading; the future is done when the engine can answer, or has failed."""
        self._thread.start()
        return self._ready

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingSettings
    ) -> "Future[list[Completion]]":
        """Answer prompts, each a sequence of token ids.

        Returns:
            One completion a prompt, in order.

        Raises:
            GeneratorError: The engine has failed, is closed, or has too many batches waiting.
        """
        command = _Generate(prompts, sampling)
        self._submit(command)
        return command.future

    def load(self, version: PolicyVersion, state: dict[str, Tensor]) -> "Future[None]":
        """Take new weights, after every batch that was asked for before has been answered.

        Args:
            version: What completions report from then on.
            state: Tensors under their Hugging Face names.

        Raises:
            GeneratorError: As for `generate`.
        """
        command = _Load(version, state)
        self._submit(command)
        return command.future

    def close(self) -> None:
        """End the thread. Batches still waiting fail."""
        if self._closed:
            return
        self._closed = True
        if self._thread.is_alive():
            self._inbox.put(None, timeout=STOP_TIMEOUT_S)
            self._thread.join(STOP_TIMEOUT_S)

    def _submit(self, command: _Generate | _Load) -> None:
        with self._admission:  # or a command could enter the inbox just after the last look into it
            if self._failure is not None:
                raise GeneratorError(f"the engine has failed: {self._failure}") from self._failure
            if self._closed:
                raise GeneratorError("the engine is closed")
            try:
                self._inbox.put_nowait(command)
            except queue.Full:
                raise GeneratorError(
                    f"expected at most {MAX_WAITING_BATCHES} batches waiting for the engine; "
                    "wait for answers before asking on"
                ) from None

    # From here on: the engine's thread.

    def _run(self) -> None:
        try:
            self._engine = _build(self._settings)
            self._vocabulary = int(self._engine.model_config.get_vocab_size())
        except BaseException as error:
            self._fail(error)
            self._ready.set_exception(error)
            return
        self._ready.set_result(None)
        try:
            while self._serve():
                pass
        except BaseException as error:  # the thread's death must reach whoever waits
            self._fail(error)
        else:
            self._fail(GeneratorError("the engine is closed"))

    def _serve(self) -> bool:
        """Take one command (waiting only while there is nothing to generate), then one engine step."""
        try:
            command = self._inbox.get(block=not self._waiting)
        except queue.Empty:
            self._step()
            return True
        if command is None:
            return False
        try:
            if isinstance(command, _Generate):
                self._admit(command)
            else:
                while self._waiting:
                    self._step()
                self._load(command)
        except BaseException as error:
            # The command is in no queue any more, so nobody else would tell its caller.
            if not command.future.done():
                command.future.set_exception(GeneratorError(f"the engine has failed: {error}"))
            raise
        return True

    def _admit(self, command: _Generate) -> None:
        from vllm import SamplingParams
        from vllm.exceptions import VLLMClientError
        from vllm.sampling_params import RequestOutputKind

        if not command.future.set_running_or_notify_cancel():
            return
        sampling = command.sampling
        if not command.prompts:
            command.future.set_result([])
            return
        added: list[str] = []
        try:
            params = SamplingParams(
                temperature=sampling.temperature,
                max_tokens=sampling.max_new_tokens,
                stop_token_ids=list(sampling.stop_token_ids),
                logprobs=0,  # of the sampled token alone
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            for index, prompt in enumerate(command.prompts):
                # Without a tokenizer vLLM does not look, and would fail when it looks up the embedding.
                if not all(0 <= token < self._vocabulary for token in prompt):
                    raise ValueError(f"expected token ids from 0 to {self._vocabulary - 1}, got {prompt!r}")
                request_id = str(next(self._ids))
                self._engine.add_request(request_id, {"prompt_token_ids": list(prompt)}, params)
                self._waiting[request_id] = (command, index)
                added.append(request_id)
        except (VLLMClientError, ValueError, TypeError, OverflowError) as error:
            # What the engine refuses must not take it down.
            self._engine.abort_request(added)
            for request_id in added:
                del self._waiting[request_id]
            command.future.set_exception(GeneratorError(f"the engine refused a prompt: {error}"))

    def _step(self) -> None:
        for output in self._engine.step():
            if not output.finished or output.request_id not in self._waiting:
                continue
            command, index = self._waiting.pop(output.request_id)
            answer = output.outputs[0]
            command.completions[index] = Completion(
                tokens=list(answer.token_ids),
                logprobs=[
                    at[token].logprob for token, at in zip(answer.token_ids, answer.logprobs, strict=True)
                ],
                versions=[self._version] * len(answer.token_ids),
                stopped=answer.finish_reason == "stop",
            )
            if len(command.completions) == len(command.prompts):
                command.future.set_result([command.completions[i] for i in range(len(command.prompts))])

    def _load(self, command: _Load) -> None:
        if not command.future.set_running_or_notify_cancel():
            return
        try:
            self._engine.collective_rpc("load_policy", args=(command.state,))
            self._engine.reset_prefix_cache()
        except Exception as error:
            # Some tensors may have been replaced: nothing that this engine says can be trusted any more.
            raise GeneratorError(f"loading version {command.version} failed half-way: {error}") from error
        self._version = command.version
        command.future.set_result(None)

    def _fail(self, error: BaseException) -> None:
        futures: list[Future[Any]] = [command.future for command, _ in self._waiting.values()]
        self._waiting.clear()
        with self._admission:
            self._failure = error
            while not self._inbox.empty():
                command = self._inbox.get_nowait()
                if command is not None:
                    futures.append(command.future)
        for future in futures:
            if not future.done():
                future.set_exception(GeneratorError(f"the engine has failed: {error}"))


def _build(settings: EngineSettings) -> Any:
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
        # Seeded sampling fails on a CPU where a prompt is split over two steps, so steps are long.
        options["max_num_batched_tokens"] = max(8192, settings.max_length)
    try:
        return LLMEngine.from_engine_args(
            EngineArgs(
                model=settings.model_path,
                skip_tokenizer_init=True,  # tokens in, tokens out
                dtype=settings.dtype,
                enforce_eager=not on_gpu,
                max_model_len=settings.max_length,
                max_num_seqs=settings.max_num_seqs,
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
