"""Checks of the trainer's side: a step, kernels, its speed and memory, weights through the store."""

import asyncio
import hashlib
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.child import SkipError, Telling
from benchmarks.gpu.shapes import documents, random_weights, shape_of, write_checkpoint
from benchmarks.gpu.stack import seconds
from rl_bridge.config.sections import Checkpointing
from rl_bridge.planning import ModelSize, bytes_by_checkpointing, choose_checkpointing
from rl_bridge.titan.architecture import Architecture
from rl_bridge.weights import WeightStore
from rl_bridge.weights.directory import WeightDirectory
from rl_bridge.weights.store import Transport

ROOM = 0.92
"""Of a card's free memory, what a plan may fill: libraries and fragments have the rest."""


STEP_FILE = "GPU_CHECK_STEP"


def step(telling: Telling) -> None:
    """Loss and gradients of a tiny model, here and in a process that sees no GPU."""
    telling.device()
    if file := os.environ.get(STEP_FILE):
        torch.save(_step_values(), file)
        return
    with tempfile.TemporaryDirectory() as folder:
        values = Path(folder) / "values.pt"
        child = [sys.executable, "-m", "benchmarks.gpu.child", "step", f"{folder}/told", "--dry"]
        hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": "", STEP_FILE: str(values)}
        subprocess.run(child, env=hidden, check=True, timeout=120)
        if not values.exists():
            raise SkipError(f"on the CPU: {Path(folder, 'told').read_text()[-300:]}")
        there = torch.load(values)
    compare(telling, _step_values(), there)


def compare(telling: Telling, here: dict[str, Any], there: dict[str, Any]) -> None:
    """Tell how far apart the values of two machines are."""
    telling.figure("parameters", len(here["gradients"]))
    for what in ("loss", "the trainer's loss", "its gradient's norm"):
        apart = abs(here[what] - there[what]) / max(1e-3, abs(there[what]))
        telling.figure(f"{what}, relative to the CPU's", apart, at_most=1e-4)
    apart = max(
        float((here["gradients"][name] - of_cpu).abs().max() / of_cpu.abs().max())
        for name, of_cpu in there["gradients"].items()
    )
    telling.figure("gradients, the largest difference over the largest entry", apart, at_most=1e-3)
    for kind, bound in (("float32", 1e-3), ("bfloat16", 0.15)):
        apart = float((here[kind] - there["float32"]).abs().max())
        telling.figure(f"log-probabilities in {kind}, from the CPU's in float32", apart, at_most=bound)


def _step_values() -> dict[str, Any]:
    """Of a model that is the same everywhere; in bfloat16 a GPU has all documents in one row (`RowAttention`)."""
    from rl_bridge.devices import own_device
    from rl_bridge.titan.model import TitanModel

    torch.set_float32_matmul_precision("highest")
    found: dict[str, Any] = {}
    batch = documents([3, 40, 17, 40, 64, 9], vocabulary=512)
    with tempfile.TemporaryDirectory() as folder:
        policy = write_checkpoint(Path(folder) / "policy", "tiny", device="cpu", dtype=torch.float32)
        for dtype in ("bfloat16", "float32"):
            model = TitanModel(policy, dtype=dtype, max_length=64, trainable=True, device=own_device())
            with model.spmd():
                outputs = model.outputs(model.pack(batch))
                assert outputs.entropy is not None
                loss = -(outputs.logprobs.mean() + 0.1 * outputs.entropy.mean())
                loss.backward()  # type: ignore[no-untyped-call]  # torch's stubs
            found[dtype] = outputs.logprobs.detach().cpu()
        told = _trainer(policy, dtype="float32", max_length=64).step(batch)
    found["gradients"] = {name: _whole(one.grad) for name, one in model.module.named_parameters()}
    return found | {
        "loss": float(loss),
        "the trainer's loss": told["loss/total"],
        "its gradient's norm": told["train/grad_norm"],
    }


def _whole(tensor: Any) -> Tensor:
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().float().cpu()


def _trainer(policy: Path, *, dtype: str, max_length: int, checkpointing: Checkpointing = "full") -> Any:
    """Of one rank, which keeps no checkpoints."""
    from rl_bridge.config import AlgorithmConfig, TrainerConfig
    from rl_bridge.trainer.settings import TrainerSettings
    from rl_bridge.trainer.trainer import Trainer

    return Trainer(
        TrainerSettings(
            model_path=str(policy),
            dtype=dtype,
            folder=str(policy.parent),
            max_length=max_length,
            max_loss_tokens=max_length,
            temperature=1.0,
            seed=0,
            trainer=TrainerConfig(iterations=8, activation_checkpointing=checkpointing),
            algorithm=AlgorithmConfig(),
        )
    )


def attention(telling: Telling) -> None:
    """Each kernel over documents that share a row, beside one document at a time."""
    from rl_bridge.titan.layers import DocumentAttention, RowAttention, document_mask

    # After layers, which tells TorchTitan about machines without an accelerator.
    from torch.nn.attention import current_flash_attention_impl  # isort: skip
    from torchtitan.models.common.attention import create_varlen_metadata_for_document  # isort: skip

    device, heads, shared, width = telling.device(), 8, 2, 64
    lengths = [5, 64, 1, 30] if telling.dry else [777, 1, 2048, 64, 1206]
    total = sum(lengths)
    draw = torch.Generator().manual_seed(0)
    exact = [
        torch.randn(1, total, n, width, generator=draw) for n in (heads, heads // shared, heads // shared)
    ]
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).unsqueeze(0)
    positions = torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0)

    row = RowAttention.Config().build()

    def varlen(q: Tensor, k: Tensor, v: Tensor, places: Tensor = positions) -> Tensor:
        metadata = create_varlen_metadata_for_document(places.to(device))
        found: Tensor = row(q, k, v, attention_masks=metadata, enable_gqa=True)
        return found

    def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = document_mask(document.to(device))
        found: Tensor = DocumentAttention.Config().build()(q, k, v, attention_masks=mask)
        return found

    kernels = [
        ("mask, float32", masked, torch.float32, 1e-3),
        ("mask, bfloat16", masked, torch.bfloat16, 0.02),
    ]
    if device == "cuda":
        kernels.append(("one row, bfloat16", varlen, torch.bfloat16, 0.02))
    for name, kernel, dtype, bound in kernels:
        rounded = [one.to(dtype) for one in exact]
        wanted = _apart([one.float() for one in rounded], lengths, shared)
        found = _with_gradients(kernel, [one.to(device) for one in rounded])
        for what, one, other in zip(("output", "d q", "d k", "d v"), found, wanted, strict=True):
            apart = float((one - other).norm() / other.norm())
            telling.figure(f"{name}: {what}, relative error", apart, at_most=bound)
    if device == "cpu":
        telling.figure("one row, bfloat16", "not on a CPU, which has no kernel for it")
        return
    telling.figure("one row computed by", current_flash_attention_impl() or "FA2, torch's own")
    rows = [torch.randn(1, 16_384, n, 128, device=device, dtype=torch.bfloat16) for n in (32, 8, 8)]
    q, k, v = (one.requires_grad_() for one in rows)
    places = torch.arange(4096).repeat(4).unsqueeze(0)
    taken = seconds(lambda: torch.autograd.grad(varlen(q, k, v, places).sum(), (q, k, v)))
    telling.figure("16,384 tokens in 4 documents, 32 heads of 128, forward and backward", 1000 * taken, "ms")
    telling.figure("which is, causal", 3.5 * 4 * 32 * 128 * 16_384 * 4096 / 2 / taken / 1e12, "TFLOP/s")


def _with_gradients(kernel: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """What comes out, and the gradients of what goes in, in float32 on the CPU."""
    inputs = [one.detach().requires_grad_() for one in inputs]
    output = kernel(*inputs)
    weighed = output.float() * torch.linspace(-1, 1, output.shape[-1], device=output.device)
    found = (output, *torch.autograd.grad(weighed.sum(), inputs))
    return [one.detach().float().cpu() for one in found]


def _apart(inputs: list[Tensor], lengths: list[int], shared: int) -> list[Tensor]:
    """Plain causal attention in float32, one document after the other."""

    def kernel(*qkv: Tensor) -> Tensor:
        outputs = []
        for q, k, v in zip(*(torch.split(one.transpose(1, 2), lengths, 2) for one in qkv), strict=True):
            scores = q @ k.repeat_interleave(shared, 1).mT / q.shape[-1] ** 0.5
            ahead = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            weights = scores.masked_fill(ahead, -torch.inf).softmax(-1)
            outputs.append(weights @ v.repeat_interleave(shared, 1))
        return torch.cat(outputs, 2).transpose(1, 2)

    return _with_gradients(kernel, inputs)


def train(telling: Telling) -> None:
    """A step of the trainer in bfloat16, with as many layers as the card has room for."""
    device, size = telling.device(), telling.size
    lengths = [32, 20, 32, 7] if telling.dry else [2048] * 16
    card = torch.cuda.get_device_properties(0).total_memory if device == "cuda" else float("inf")
    free = ROOM * torch.cuda.mem_get_info()[0] if device == "cuda" else float("inf")
    one = whole = shape_of(size)
    while _planned(one, max(lengths))["full"] > free and one.layers > 1:
        one = replace(one, layers=one.layers - 1)
    planned = _planned(one, max(lengths))
    kind = choose_checkpointing(planned, card)
    telling.figure("layers", f"{one.layers} of {whole.layers}, {one.parameters / 1e9:.3g}e9 parameters")
    telling.figure("trainer.activation_checkpointing", kind)
    telling.figure("memory by ropewalk plan", planned[kind] / 1e9, "GB")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "policy"
        write_checkpoint(path, size, device=device, dtype=torch.bfloat16, layers=one.layers)
        trainer = _trainer(path, dtype="bfloat16", max_length=max(lengths), checkpointing=kind)
    batch = documents(lengths, vocabulary=one.vocabulary)
    found = []
    for _ in range(2 if telling.dry else 4):
        trainer.step(batch)
        found.append(trainer.measured)
    for name, value in max(found[1:], key=lambda figures: figures["train/tokens_per_s"]).items():
        telling.figure(name, value)


def _planned(one: Architecture, max_length: int) -> dict[Checkpointing, int]:
    """Bytes that `ropewalk plan` says of a trainer of one rank on a GPU, by its activation checkpointing."""
    from rl_bridge.config import Config

    keys = {"model": {"dtype": "bfloat16"}, "rollout": {"max_length": max_length}, "trainer": {"num_gpus": 1}}
    size = ModelSize(parameters=one.parameters, architecture=one)
    return bytes_by_checkpointing(Config.model_validate(keys), size)


def weights(telling: Telling) -> None:
    """Master weights in float32 on the card, by each transport in bfloat16, onto the card in another process."""
    device = telling.device()
    one = whole = shape_of(telling.size)
    # Beside the masters three versions that are kept, and a tensor that is taken.
    while device == "cuda" and 11.5 * one.parameters > torch.cuda.mem_get_info()[0]:
        one = replace(one, layers=one.layers - 1)
    telling.figure("layers", f"{one.layers} of {whole.layers}")
    state = random_weights(one, device=device, dtype=torch.float32)
    sent = sum(2 * tensor.numel() for tensor in state.values())
    telling.figure("sent", sent / 1e9, "GB")
    expected = {name: _digest(tensor.to(torch.bfloat16)) for name, tensor in state.items()}
    transports: list[Transport] = ["shared_memory"]
    if device == "cuda":
        transports.append("cuda_ipc")
    else:
        telling.figure("cuda_ipc", "not measured: it wants a GPU")
    for transport in transports:
        asyncio.run(_through_the_store(telling, transport, state, sent, expected))


async def _through_the_store(
    telling: Telling, transport: Transport, state: dict[str, Tensor], sent: int, expected: dict[str, str]
) -> None:
    directory = WeightDirectory()
    store = WeightStore(directory, transport=transport)
    device = str(next(iter(state.values())).device)
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    reader = context.Process(target=_read, args=(there, transport, device), daemon=True)
    reader.start()
    there.close()
    before = _shared_memory()

    async def ask(question: object) -> tuple[float, dict[str, str]]:
        here.send(question)
        answer = await asyncio.to_thread(here.recv)
        if isinstance(answer, str):
            raise RuntimeError(f"the reader failed: {answer}")
        took, digests = answer
        return took, digests

    def tell_difference(what: str, digests: dict[str, str]) -> None:
        wrong = [name for name, digest in expected.items() if digests.get(name) != digest]
        telling.figure(f"{transport}: {what}", len(wrong), at_most=0)

    try:
        for version in range(6):
            began = time.perf_counter()
            await store.put(version, state, dtype=torch.bfloat16)
            pushed = time.perf_counter() - began
            if version == 0:
                telling.figure(f"{transport}: first push", pushed, "s")
                _, digests = await ask((await directory.find(0, 0), True))
                tell_difference("tensors that came otherwise", digests)
            if version in (0, 2):  # what comes while the reader holds the first is told apart from it
                for tensor in state.values():
                    tensor.neg_()
            if version == 2:
                _, digests = await ask(None)
                tell_difference("tensors that changed while they were held", digests)
            if version > 2:
                taken, _ = await ask((await directory.find(version, 0), False))
        for what, took in (("push", pushed), ("take, onto the device", taken)):
            telling.figure(f"{transport}: {what}", took, "s")
            telling.figure(f"{transport}: {what}", sent / 1e9 / took, "GB/s")
        # Two versions, and a third because one of them was held.
        held, bound = (_shared_memory() - before) / sent, 3.1 if transport == "shared_memory" else 0.1
        telling.figure(f"{transport}: host memory of the publisher, over what is sent", held, at_most=bound)
    finally:
        here.close()  # which ends the reader
        await asyncio.to_thread(reader.join, 10.0)
        await store.close()


def _read(pipe: Connection, transport: Transport, device: str) -> None:
    """The generator's side: in a process of its own it takes what it is told of, until nobody tells it any more."""
    try:
        asyncio.run(_take(pipe, transport, device))
    except EOFError:
        pass
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")


async def _take(pipe: Connection, transport: Transport, device: str) -> None:
    directory = WeightDirectory()
    store = WeightStore(directory, transport=transport)
    while True:
        snapshot, compare = pipe.recv()
        (one,) = snapshot.contributions
        await directory.announce(snapshot.key, snapshot.publication, one.origin, 1, None)
        await directory.complete(snapshot.key, snapshot.publication, one)
        began = time.perf_counter()
        async with store.open(snapshot.key, device=device) as there:
            if compare:
                pipe.send((0.0, {name: _digest(tensor) for name, tensor in there.items()}))
                pipe.recv()  # the publisher has gone on meanwhile
                digests = {name: _digest(tensor) for name, tensor in there.items()}
            else:
                digests = {}
                for tensor in there.values():
                    tensor.to(device, copy=True)
            if device != "cpu":
                torch.cuda.synchronize()
            took = time.perf_counter() - began
        pipe.send((took, digests))


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.cpu().flatten().view(torch.uint8).numpy().data).hexdigest()


def _shared_memory() -> int:
    """Bytes that this process has mapped of it."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("RssShmem:"))
    return int(line.split()[1]) * 1024
