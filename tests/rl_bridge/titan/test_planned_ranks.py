"""The memory that `ropewalk plan` gives a rank among many, against the tensors of a whole step that take none.

Rank 0 of a group that does not communicate runs a forward and a backward pass on fake tensors, which have shapes but no
memory. Its experts get as many tokens as they would if all were chosen evenly.
"""

import json
import weakref
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from rl_bridge.config import Config, ParallelConfig
from rl_bridge.planning import ModelSize, memory_of_roles
from tests.rl_bridge.planning.published_models import QWEN3_8B, QWEN3_30B_A3B, QWEN3_32B

pytestmark = [pytest.mark.heavy, pytest.mark.soak, pytest.mark.timeout(600)]

TOKENS, CHUNK = 2048, 256


@pytest.mark.parametrize(
    ("published", "ranks", "parallel", "checkpointing"),
    [
        (QWEN3_8B, 8, {}, "none"),
        (QWEN3_8B, 16, {"tp": 2}, "full"),
        (QWEN3_8B, 64, {"hsdp": 2}, "full"),
        (QWEN3_32B, 16, {}, "full"),
        (QWEN3_32B, 32, {"tp": 4}, "none"),
        (QWEN3_32B, 64, {"hsdp": 2, "tp": 4}, "full"),
        (QWEN3_30B_A3B, 8, {}, "full"),
        (QWEN3_30B_A3B, 16, {"ep": 8}, "none"),
        (QWEN3_30B_A3B, 32, {"ep": 4, "tp": 2}, "full"),
        (QWEN3_30B_A3B, 64, {"hsdp": 2, "ep": 8}, "full"),
    ],
    ids=lambda value: value.get("model_type", str(value)) if isinstance(value, dict) else str(value),
)
def test_a_step_takes_what_is_planned(
    tmp_path: Path, published: dict[str, Any], ranks: int, parallel: dict[str, int], checkpointing: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(published))
    config = Config.model_validate(
        {
            "model": {"dtype": "bfloat16"},
            "rollout": {"max_length": TOKENS},
            "trainer": {
                "tokens_per_pass": TOKENS,
                "tokens_per_chunk": CHUNK,
                "activation_checkpointing": checkpointing,
                "parallel": parallel,
            },
            "monarch": {"roles": {"trainer": {"procs": ranks}}},
        }
    )
    planned = memory_of_roles(config, ModelSize.of_folder(tmp_path))[0].process_bytes
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        found = process.submit(_find_peak_bytes, tmp_path, ranks, parallel, checkpointing).result()
    assert planned / found == pytest.approx(1.0, abs=0.1)


class _Peak(TorchDispatchMode):
    """The most bytes of tensors that existed at once, those of `add` included."""

    def __init__(self) -> None:
        super().__init__()
        self._bytes: dict[int, int] = {}
        self._references: dict[int, weakref.ref[Any]] = {}
        self._now = self.bytes = 0

    def add(self, tensor: Tensor) -> None:
        storage = (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()
        if (key := id(storage)) not in self._bytes:
            self._references[key] = weakref.ref(storage, lambda _: self._resize(key, 0))
            self._bytes[key] = 0
            self._resize(key, storage.nbytes())

    def _resize(self, key: int, nbytes: int) -> None:
        self._now += nbytes - self._bytes[key]
        self.bytes = max(self.bytes, self._now)
        self._bytes[key] = nbytes
        if self._references[key]() is None:
            del self._bytes[key], self._references[key]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it calls this again, with the local tensors
        result = func(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, Tensor):
                self.add(value)
        return result

    def watch_resizes(self) -> None:
        """Notice that FSDP frees and allocates storages."""
        resize: Callable[..., None] = torch.UntypedStorage.resize_

        def watched(storage: Any, nbytes: int) -> None:
            resize(storage, nbytes)
            if id(storage) in self._bytes:
                self._resize(id(storage), nbytes)

        torch.UntypedStorage.resize_ = watched  # type: ignore[method-assign,assignment]


def _find_peak_bytes(path: Path, ranks: int, parallel: dict[str, int], checkpointing: str) -> int:
    """Return the peak of the second of two passes, in a process of its own."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from benchmarks.gpu.shapes import documents
    from rl_bridge.titan import layers, model

    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher as Dispatcher  # isort: skip

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    mode, materialize, dispatch, routed = (
        FakeTensorMode(allow_non_fake_inputs=True),
        model._materialize,
        Dispatcher.dispatch,
        [0],
    )

    def materialize_fake(module: Any, device: torch.device) -> Any:
        with mode:
            return materialize(module, device)

    def dispatch_counted(self: Any, x: Tensor, scores: Tensor, experts: Tensor, counts: Tensor) -> Any:
        routed[0] = experts.numel()
        return dispatch(self, x, scores, experts, counts)

    def split_evenly(self: Any, counts: Tensor, _: Tensor, degree: int) -> Any:
        return counts.new_empty(counts.numel()), *[[routed[0] // degree] * degree] * 2

    # What depends on values, which fake tensors lack.
    model._materialize = materialize_fake
    model.TitanModel._load = lambda *_, **__: None  # type: ignore[method-assign]
    layers.compute_local_shape_and_global_offset = lambda *_: ((), (0, 0))
    Dispatcher.dispatch, Dispatcher._sync_token_count_exchange = dispatch_counted, split_evenly
    made = model.TitanModel(
        path,
        dtype="bfloat16",
        max_length=TOKENS,
        trainable=True,
        device=torch.device("cpu"),
        parallel=ParallelConfig(**parallel),
        activation_checkpointing=checkpointing,
        chunk=CHUNK,
    )
    rows, peak = made.pack(documents([TOKENS], vocabulary=512)), _Peak()
    with mode:
        weights = [weight.to_local() for weight in made.module.parameters()]
        moments = [torch.empty_like(weight) for weight in weights for _ in range(2)]
        for tensor in (*weights, *moments, *made.module.buffers()):
            peak.add(tensor)
        peak.watch_resizes()
        with peak:
            for _ in range(2):
                with made.spmd():
                    made.outputs(rows).logprobs.sum().backward()
    return peak.bytes
