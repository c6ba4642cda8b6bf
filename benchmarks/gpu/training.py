"""Checks of the trainer: a step, attention kernels, speed and memory, weights through the store."""

import asyncio
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

from benchmarks.gpu.child import Reporter, SkipError
from benchmarks.gpu.shapes import documents, random_weights, shape_of, write_checkpoint
from benchmarks.gpu.stack import seconds
from benchmarks.processes import own_memory
from rl_bridge.config.trainer import Checkpointing
from rl_bridge.planning import ModelSize, bytes_by_checkpointing, choose_checkpointing
from rl_bridge.titan.architecture import Architecture
from rl_bridge.weights import WeightStore
from rl_bridge.weights.directory import WeightDirectory
from rl_bridge.weights.store import Transport

ROOM = 0.92
"""Share of the card's free memory that a plan may use; the rest is for libraries and fragmentation."""
DIGEST_CHUNK = 1 << 24


STEP_FILE = "GPU_CHECK_STEP"


def step(reporter: Reporter) -> None:
    """Compare loss and gradients of a tiny model with those of a process that sees no GPU."""
    reporter.device()
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
        reference = torch.load(values)
    compare(reporter, _step_values(), reference)


def compare(reporter: Reporter, ours: dict[str, Any], reference: dict[str, Any]) -> None:
    """Record the differences between values computed on two devices."""
    reporter.record("parameters", len(ours["gradients"]))
    for name in ("loss", "the trainer's loss", "its gradient's norm"):
        apart = abs(ours[name] - reference[name]) / max(1e-3, abs(reference[name]))
        reporter.record(f"{name}, relative to the CPU's", apart, at_most=1e-4)
    apart = max(
        float((ours["gradients"][name] - of_cpu).abs().max() / of_cpu.abs().max())
        for name, of_cpu in reference["gradients"].items()
    )
    reporter.record("gradients, the largest difference over the largest entry", apart, at_most=1e-3)
    for kind, bound in (("float32", 1e-3), ("bfloat16", 0.15)):
        apart = float((ours[kind] - reference["float32"]).abs().max())
        reporter.record(f"log-probabilities in {kind}, from the CPU's in float32", apart, at_most=bound)


def _step_values() -> dict[str, Any]:
    """Return loss, gradients and log-probabilities of a fixed model; in bfloat16 a GPU uses `RowAttention`."""
    from rl_bridge.devices import own_device
    from rl_bridge.titan.model import TitanModel

    torch.set_float32_matmul_precision("highest")
    values: dict[str, Any] = {}
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
            values[dtype] = outputs.logprobs.detach().cpu()
        metrics = _trainer(policy, dtype="float32", max_length=64).step(batch)
    values["gradients"] = {name: _whole(one.grad) for name, one in model.module.named_parameters()}
    trained = {"the trainer's loss": metrics["loss/total"], "its gradient's norm": metrics["train/grad_norm"]}
    return values | trained | {"loss": float(loss)}


def _whole(tensor: Any) -> Tensor:
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().float().cpu()


def _trainer(policy: Path, *, dtype: str, max_length: int, checkpointing: Checkpointing = "full") -> Any:
    """Return a trainer with one rank that writes no checkpoints."""
    from rl_bridge.config import Config
    from rl_bridge.trainer.settings import TrainerSettings
    from rl_bridge.trainer.trainer import Trainer

    keys = {
        "model": {"dtype": dtype},
        "rollout": {"max_length": max_length},
        "trainer": {"iterations": 8, "activation_checkpointing": checkpointing},
    }
    config, paths = Config.model_validate(keys), {"model_path": str(policy), "folder": str(policy.parent)}
    return Trainer(TrainerSettings(config=config, max_loss_tokens=max_length, **paths))


def attention(reporter: Reporter) -> None:
    """Compare each kernel over documents packed into a row with plain attention, one document at a time."""
    from rl_bridge.titan.layers import DocumentAttention, RowAttention, document_mask

    # Imported after layers, which configures TorchTitan for machines without an accelerator.
    from torch.nn.attention import current_flash_attention_impl  # isort: skip
    from torchtitan.models.common.attention import create_varlen_metadata_for_document  # isort: skip

    device, heads, shared, width = reporter.device(), 8, 2, 64
    lengths = [5, 64, 1, 30] if reporter.dry else [777, 1, 2048, 64, 1206]
    total = sum(lengths)
    draw = torch.Generator().manual_seed(0)
    counts = (heads, heads // shared, heads // shared)
    exact = [torch.randn(1, total, n, width, generator=draw) for n in counts]
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).unsqueeze(0)
    positions = torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0)

    row = RowAttention.Config().build()

    def varlen(q: Tensor, k: Tensor, v: Tensor, places: Tensor = positions) -> Tensor:
        metadata = create_varlen_metadata_for_document(places.to(device))
        output: Tensor = row(q, k, v, attention_masks=metadata, enable_gqa=True)
        return output

    def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = document_mask(document.to(device))
        output: Tensor = DocumentAttention.Config().build()(q, k, v, attention_masks=mask)
        return output

    kernels = [
        ("mask, float32", masked, torch.float32, 1e-3),
        ("mask, bfloat16", masked, torch.bfloat16, 0.02),
    ]
    if device == "cuda":
        kernels.append(("one row, bfloat16", varlen, torch.bfloat16, 0.02))
    for name, kernel, dtype, bound in kernels:
        rounded = [tensor.to(dtype) for tensor in exact]
        reference = _apart([tensor.float() for tensor in rounded], lengths, shared)
        results = _with_gradients(kernel, [tensor.to(device) for tensor in rounded])
        for label, tensor, expected in zip(("output", "d q", "d k", "d v"), results, reference, strict=True):
            apart = float((tensor - expected).norm() / expected.norm())
            reporter.record(f"{name}: {label}, relative error", apart, at_most=bound)
    if device == "cpu":
        reporter.record("one row, bfloat16", "not on a CPU, which has no kernel for it")
        return
    reporter.record("one row computed by", current_flash_attention_impl() or "FA2, torch's own")
    rows = [torch.randn(1, 16_384, n, 128, device=device, dtype=torch.bfloat16) for n in (32, 8, 8)]
    q, k, v = (tensor.requires_grad_() for tensor in rows)
    places = torch.arange(4096).repeat(4).unsqueeze(0)
    elapsed_s = seconds(lambda: torch.autograd.grad(varlen(q, k, v, places).sum(), (q, k, v)))
    label = "16,384 tokens in 4 documents, 32 heads of 128, forward and backward"
    reporter.record(label, 1000 * elapsed_s, "ms")
    reporter.record("which is, causal", 3.5 * 4 * 32 * 128 * 16_384 * 4096 / 2 / elapsed_s / 1e12, "TFLOP/s")


def _with_gradients(kernel: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """Return the output and the gradients of the inputs, in float32 on the CPU."""
    inputs = [tensor.detach().requires_grad_() for tensor in inputs]
    output = kernel(*inputs)
    weighed = output.float() * torch.linspace(-1, 1, output.shape[-1], device=output.device)
    results = (output, *torch.autograd.grad(weighed.sum(), inputs))
    return [tensor.detach().float().cpu() for tensor in results]


def _apart(inputs: list[Tensor], lengths: list[int], shared: int) -> list[Tensor]:
    """Return plain causal attention in float32, one document after another, with gradients."""

    def kernel(*qkv: Tensor) -> Tensor:
        outputs = []
        for q, k, v in zip(*(torch.split(tensor.transpose(1, 2), lengths, 2) for tensor in qkv), strict=True):
            scores = q @ k.repeat_interleave(shared, 1).mT / q.shape[-1] ** 0.5
            ahead = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            weights = scores.masked_fill(ahead, -torch.inf).softmax(-1)
            outputs.append(weights @ v.repeat_interleave(shared, 1))
        return torch.cat(outputs, 2).transpose(1, 2)

    return _with_gradients(kernel, inputs)


def train(reporter: Reporter) -> None:
    """Measure a step of the trainer in bfloat16, with as many layers as fit on the card."""
    device, size = reporter.device(), reporter.size
    lengths = [32, 20, 32, 7] if reporter.dry else [2048] * 16
    card = torch.cuda.get_device_properties(0).total_memory if device == "cuda" else float("inf")
    free = ROOM * torch.cuda.mem_get_info()[0] if device == "cuda" else float("inf")
    architecture = full = shape_of(size)
    while _planned(architecture, max(lengths))["full"] > free and architecture.layers > 1:
        architecture = replace(architecture, layers=architecture.layers - 1)
    planned = _planned(architecture, max(lengths))
    checkpointing = choose_checkpointing(planned, card)
    parameters = f"{architecture.parameters / 1e9:.3g}e9 parameters"
    reporter.record("layers", f"{architecture.layers} of {full.layers}, {parameters}")
    reporter.record("trainer.activation_checkpointing", checkpointing)
    reporter.record("memory by ropewalk plan", planned[checkpointing] / 1e9, "GB")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "policy"
        write_checkpoint(path, size, device=device, dtype=torch.bfloat16, layers=architecture.layers)
        trainer = _trainer(path, dtype="bfloat16", max_length=max(lengths), checkpointing=checkpointing)
        batch = documents(lengths, vocabulary=architecture.vocabulary)
        metrics = []
        for _ in range(2 if reporter.dry else 4):
            trainer.step(batch)
            metrics.append(trainer.measured)
    for name, value in max(metrics[1:], key=lambda step_metrics: step_metrics["train/tokens_per_s"]).items():
        reporter.record(name, value)


def _planned(architecture: Architecture, max_length: int) -> dict[Checkpointing, int]:
    """Return the bytes that `ropewalk plan` estimates for a one-rank trainer on a GPU, by activation checkpointing."""
    from rl_bridge.config import Config

    keys = {"model": {"dtype": "bfloat16"}, "rollout": {"max_length": max_length}, "trainer": {"num_gpus": 1}}
    size = ModelSize(parameters=architecture.parameters, architecture=architecture)
    return bytes_by_checkpointing(Config.model_validate(keys), size)


def weights(reporter: Reporter) -> None:
    """Send float32 master weights from the card in bfloat16 to the card in another process, by each transport."""
    device = reporter.device()
    architecture = full = shape_of(reporter.size)
    # Room for the master weights, three retained versions, and a tensor being copied.
    while device == "cuda" and 11.5 * architecture.parameters > torch.cuda.mem_get_info()[0]:
        architecture = replace(architecture, layers=architecture.layers - 1)
    reporter.record("layers", f"{architecture.layers} of {full.layers}")
    state = random_weights(architecture, device=device, dtype=torch.float32)
    sent = sum(2 * tensor.numel() for tensor in state.values())
    reporter.record("sent", sent / 1e9, "GB")
    expected = {name: _digest(tensor.to(torch.bfloat16)) for name, tensor in state.items()}
    transports: list[Transport] = ["shared_memory"]
    if device == "cuda":
        transports.append("cuda_ipc")
    else:
        reporter.record("cuda_ipc", "not measured: it wants a GPU")
    for transport in transports:
        asyncio.run(_through_the_store(reporter, transport, state, sent, expected))


async def _through_the_store(
    reporter: Reporter, transport: Transport, state: dict[str, Tensor], sent: int, expected: dict[str, int]
) -> None:
    directory = WeightDirectory()
    store = WeightStore(directory, transport=transport)
    device = str(next(iter(state.values())).device)
    connection, reader_connection = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    reader = context.Process(target=_read, args=(reader_connection, transport, device), daemon=True)
    reader.start()
    reader_connection.close()
    before = own_memory("RssShmem")

    async def ask(question: object) -> tuple[float, dict[str, int]]:
        connection.send(question)
        answer = await asyncio.to_thread(connection.recv)
        if isinstance(answer, str):
            raise RuntimeError(f"the reader failed: {answer}")
        took, digests = answer
        return took, digests

    def tell_difference(label: str, digests: dict[str, int]) -> None:
        wrong = [name for name, digest in expected.items() if digests.get(name) != digest]
        reporter.record(f"{transport}: {label}", len(wrong), at_most=0)

    try:
        for version in range(6):
            began = time.perf_counter()
            await store.put(version, state, dtype=torch.bfloat16)
            pushed = time.perf_counter() - began
            if version == 0:
                reporter.record(f"{transport}: first push", pushed, "s")
                _, digests = await ask((await directory.find(0, 0), True))
                tell_difference("tensors that came otherwise", digests)
            if version in (0, 2):  # so that later versions differ from the first, which the reader holds
                for tensor in state.values():
                    tensor.neg_()
            if version == 2:
                _, digests = await ask(None)
                tell_difference("tensors that changed while they were held", digests)
            if version > 2:
                loaded_s, _ = await ask((await directory.find(version, 0), False))
        for label, took in (("push", pushed), ("take, onto the device", loaded_s)):
            reporter.record(f"{transport}: {label}", took, "s")
            reporter.record(f"{transport}: {label}", sent / 1e9 / took, "GB/s")
        # The store keeps two versions, and a third because the reader held one.
        shared_ratio, bound = (
            (own_memory("RssShmem") - before) / sent,
            3.1 if transport == "shared_memory" else 0.1,
        )
        label = f"{transport}: host memory of the publisher, over what is sent"
        reporter.record(label, shared_ratio, at_most=bound)
    finally:
        connection.close()  # ends the reader
        await asyncio.to_thread(reader.join, 10.0)
        await store.close()


def _read(pipe: Connection, transport: Transport, device: str) -> None:
    """Run the reader process: load each snapshot received, until the pipe is closed."""
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
        (contribution,) = snapshot.contributions
        await directory.announce(snapshot.key, snapshot.publication, contribution.origin, 1, None)
        await directory.complete(snapshot.key, snapshot.publication, contribution)
        began = time.perf_counter()
        async with store.open(snapshot.key, device=device) as tensors:
            if compare:
                pipe.send((0.0, {name: _digest(tensor.to(device)) for name, tensor in tensors.items()}))
                pipe.recv()  # the publisher has published further versions meanwhile
                digests = {name: _digest(tensor.to(device)) for name, tensor in tensors.items()}
            else:
                digests = {}
                for tensor in tensors.values():
                    tensor.to(device, copy=True)
            if device != "cpu":
                torch.cuda.synchronize()
            took = time.perf_counter() - began
        pipe.send((took, digests))


def _digest(tensor: Tensor) -> int:
    """Return a checksum of the bits and their positions, computed on the tensor's device for speed."""
    halves, total = tensor.flatten().view(torch.int16), 0
    for begin in range(0, len(halves), DIGEST_CHUNK):
        chunk = halves[begin : begin + DIGEST_CHUNK].long()
        places = torch.arange(begin, begin + len(chunk), device=chunk.device)
        total ^= int(((chunk + 40_503) * (2 * places + 1)).sum())  # wraps around
    return total
