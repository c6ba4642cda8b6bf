"""The two sides as actors, a trainer of one rank or several and a generator, and their model."""

import ctypes
import time

import torch
import torch.distributed as dist
from monarch.actor import Actor, current_rank, endpoint
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.processes import own_memory, reset_own_peak
from rl_bridge.weights import WeightStore

DIM, HIDDEN, VOCABULARY = 640, 1728, 32_768
LAYER_PARAMETERS = 4 * DIM * DIM + 3 * DIM * HIDDEN + 2 * DIM


def make_layer() -> nn.ModuleDict:
    """Return the matrices and norms of one transformer layer."""
    linear = {f"{name}_proj": (DIM, DIM) for name in "qkvo"}
    linear |= {"gate_proj": (DIM, HIDDEN), "up_proj": (DIM, HIDDEN), "down_proj": (HIDDEN, DIM)}
    modules: dict[str, nn.Module] = {name: nn.Linear(*shape, bias=False) for name, shape in linear.items()}
    norms = ("input_layernorm", "post_attention_layernorm")
    return nn.ModuleDict(modules | {name: nn.LayerNorm(DIM, bias=False) for name in norms})


class Model(nn.Module):
    """An embedding and layers of about so many parameters."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        layers = max(1, round((parameters - DIM * VOCABULARY) / LAYER_PARAMETERS))
        self.embed_tokens = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList(make_layer() for _ in range(layers))


def make_model(parameters: int) -> Model:
    """Return the model on the meta device; `to_empty` allocates its memory."""
    with torch.device("meta"):
        return Model(parameters).requires_grad_(False)


class TrainerRole(Actor):  # type: ignore[misc]
    """A trainer's rank, which publishes its shards of a model."""

    def __init__(self, store: WeightStore, parameters: int, ranks: int, rendezvous: str) -> None:
        torch.set_num_threads(1)
        self._store = store
        self._rank, self._ranks = current_rank().rank, ranks
        model = make_model(parameters)
        if ranks > 1:
            dist.init_process_group(
                "gloo", init_method=f"file://{rendezvous}", rank=self._rank, world_size=ranks
            )
            fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
        model.to_empty(device="cpu")
        self._state: dict[str, Tensor] = model.state_dict()

    @endpoint  # type: ignore[untyped-decorator]
    async def fill(self, value: float) -> int:
        """Set every weight; returns the bytes of the whole model."""
        for tensor in self._state.values():
            tensor.fill_(value)
        return sum(tensor.numel() * tensor.element_size() for tensor in self._state.values())

    @endpoint  # type: ignore[untyped-decorator]
    async def put(self, version: int) -> dict[str, float]:
        """Publish the shards as a version.

        Returns:
            "began" on the machine's monotonic clock, "seconds", and "bytes" by which the rank's memory, private and
            shared, grew at most.
        """
        before = own_memory("VmRSS")
        reset_own_peak()
        began = time.monotonic()
        await self._store.put(version, self._state, rank=self._rank, ranks=self._ranks)
        seconds = time.monotonic() - began
        return {"began": began, "seconds": seconds, "bytes": own_memory("VmHWM") - before}


class GeneratorRole(Actor):  # type: ignore[misc]
    """A generator that copies weights into its own memory, like an engine."""

    def __init__(self, store: WeightStore, parameters: int) -> None:
        torch.set_num_threads(1)
        self._store = store
        model = make_model(parameters).to_empty(device="cpu")
        self._own: dict[str, Tensor] = model.state_dict()
        for tensor in self._own.values():
            tensor.fill_(0.0)
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in self._own.values())
        self._source = torch.ones(nbytes, dtype=torch.uint8)
        self._target = torch.zeros(nbytes, dtype=torch.uint8)

    @endpoint  # type: ignore[untyped-decorator]
    async def ready(self) -> None:
        """Return once the actor is ready."""

    @endpoint  # type: ignore[untyped-decorator]
    async def take(self, version: int) -> dict[str, float]:
        """Take a version as an engine does: open it and copy it into the model.

        Returns:
            When the tensors were "opened", on the machine's monotonic clock; "memcpy_s", one thread's memcpy of as many
            bytes into touched memory, just after; and the number of distinct "values", 1 if the snapshot is consistent.
        """
        async with self._store.open(version) as state:
            opened = time.monotonic()
            for name, tensor in state.items():
                self._own[name].copy_(tensor)
        values = {float(bound) for tensor in self._own.values() for bound in torch.aminmax(tensor)}
        return {"opened": opened, "memcpy_s": self._memcpy(), "values": len(values)}

    def _memcpy(self) -> float:
        began = time.monotonic()
        ctypes.memmove(self._target.data_ptr(), self._source.data_ptr(), self._source.numel())
        return time.monotonic() - began
