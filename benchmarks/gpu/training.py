"""Checks of the trainer's side: the stack, kernels, the last layer, a step, weights through the store."""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.child import SkipError, Telling
from benchmarks.gpu.shapes import documents, random_weights, shape_of, write_checkpoint

GIB = 1 << 30
MOST_HELD = 4.1
"""Times what is sent: two versions in the publisher's segments, and its reader's mappings of them, here one process."""


def seconds(work: Callable[[], object], *, times: int = 5) -> float:
    """The median of so many times, after one that does not count."""
    taken = []
    for _ in range(times + 1):
        began = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return sorted(taken[1:])[times // 2]


def versions(telling: Telling) -> None:
    """The stack, the card, and whether it multiplies and copies as it should."""
    telling.figure("python", sys.version.split()[0])
    telling.figure("torch", torch.__version__)
    telling.figure("torch's CUDA", str(torch.version.cuda))
    try:
        from rl_bridge.doctor.machine import packages
    except ModuleNotFoundError as error:
        telling.figure("packages", f"not looked at: {error.name} is not installed")
    else:
        for finding in packages()[1:]:
            telling.figure(finding.what, finding.told)
    told = "nvidia-smi --query-gpu=driver_version,memory.total --format=csv,noheader"
    try:
        driver = subprocess.run(told.split(), capture_output=True, text=True, timeout=30, check=True).stdout
        telling.figure("driver, memory", "; ".join(driver.split("\n")).strip("; "))
    except (OSError, subprocess.SubprocessError) as error:
        telling.figure("driver", f"nvidia-smi does not say: {error}")
    if not telling.dry and not torch.cuda.is_available():
        raise RuntimeError(
            f"torch {torch.__version__} sees no GPU: "
            + (
                "it is built without CUDA"
                if torch.version.cuda is None
                else "is the driver as new as its CUDA?"
            )
        )
    device, size = telling.device(), 256 if telling.dry else 8192
    if device == "cuda":
        card = torch.cuda.get_device_properties(0)
        telling.figure("card", f"{card.name}, {card.total_memory / GIB:.1f} GiB, {card.major}.{card.minor}")
        telling.figure("bf16", str(torch.cuda.is_bf16_supported(including_emulation=False)))
    one, other = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    exact = one[:64].cpu().double() @ other.cpu().double()
    error_ = ((one @ other)[:64].cpu().double() - exact).norm() / exact.norm()
    telling.figure("bf16 product, relative error", float(error_), at_most=0.01)
    flops = 2 * size**3 / seconds(lambda: one @ other)
    telling.figure("bf16 products", flops / 1e12, "TFLOP/s")
    if device == "cuda":
        from rl_bridge.trainer.metrics import peak_flops

        if (peak := peak_flops(torch.cuda.get_device_name())) is not None:
            telling.figure("of its peak", flops / peak)
        there = torch.empty(GIB, dtype=torch.uint8, device=device)
        for name, host in (("pageable", there.cpu()), ("pinned", there.cpu().pin_memory())):
            onto, back = (seconds(partial(a.copy_, b)) for a, b in ((there, host), (host, there)))
            telling.figure(f"{name} memory to the card", GIB / 1e9 / onto, "GB/s")
            telling.figure(f"the card to {name} memory", GIB / 1e9 / back, "GB/s")


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
    here = _step_values()
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
    from rl_bridge.config import AlgorithmConfig, TrainerConfig
    from rl_bridge.devices import own_device
    from rl_bridge.titan.model import TitanModel
    from rl_bridge.trainer.settings import TrainerSettings
    from rl_bridge.trainer.trainer import Trainer

    torch.set_float32_matmul_precision("highest")
    device = own_device()
    with tempfile.TemporaryDirectory() as folder:
        policy = write_checkpoint(Path(folder) / "policy", "tiny", device="cpu", dtype=torch.float32)
        batch = documents([3, 40, 17, 40, 64, 9], vocabulary=512)
        found: dict[str, Any] = {}
        for dtype in ("float32", "bfloat16"):
            model = TitanModel(policy, dtype=dtype, max_length=64, trainable=True, device=device)
            with model.spmd():
                outputs = model.outputs(model.pack(batch))
                assert outputs.entropy is not None
                loss = -(outputs.logprobs.mean() + 0.1 * outputs.entropy.mean())
                loss.backward()  # type: ignore[no-untyped-call]  # torch's stubs
            found[dtype] = outputs.logprobs.detach().cpu()
            if dtype == "float32":
                found["loss"] = float(loss)
                found["gradients"] = {
                    name: _whole(one.grad)
                    for name, one in model.module.named_parameters()
                    if one.grad is not None
                }
        settings = TrainerSettings(
            model_path=str(policy),
            dtype="float32",
            folder=folder,
            max_length=64,
            max_loss_tokens=64,
            temperature=1.0,
            seed=0,
            trainer=TrainerConfig(iterations=1, learning_rate=1e-3),
            algorithm=AlgorithmConfig(),
        )
        told = Trainer(settings).step(batch)
    found["the trainer's loss"], found["its gradient's norm"] = told["loss/total"], told["train/grad_norm"]
    return found


def _whole(tensor: Any) -> Tensor:
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().float().cpu()


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

    def varlen(q: Tensor, k: Tensor, v: Tensor, places: Tensor = positions) -> Tensor:
        metadata = create_varlen_metadata_for_document(places.to(device))
        found: Tensor = RowAttention.Config().build()(q, k, v, attention_masks=metadata, enable_gqa=True)
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
        for what, one, other in zip(
            ("output", "d queries", "d keys", "d values"), found, wanted, strict=True
        ):
            telling.figure(
                f"{name}: {what}, relative error", float((one - other).norm() / other.norm()), at_most=bound
            )
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


def loss(telling: Telling) -> None:
    """The last layer's memory at Qwen3's vocabulary, which must not grow with the tokens."""
    from benchmarks.loss import CHUNK, MOST, VOCABULARY, arithmetic, peak, peak_on_gpu

    if telling.device() == "cpu":
        expected = arithmetic(vocabulary=8192, chunk=CHUNK)
        for tokens in (1024, 2048):
            found = peak(tokens, vocabulary=8192, chunk=CHUNK)
            telling.figure(f"{tokens:,} tokens, over the arithmetic", found / expected, at_most=MOST)
        return
    width, dtype = 1024, torch.bfloat16
    expected = arithmetic(vocabulary=VOCABULARY, chunk=CHUNK, width=width, dtype=dtype)
    telling.figure("by arithmetic", expected / 1e9, "GB")
    for tokens in (4096, 16_384, 32_768):
        found, taken = peak_on_gpu(tokens, vocabulary=VOCABULARY, chunk=CHUNK, width=width, dtype=dtype)
        telling.figure(f"{tokens:,} tokens", found / 1e9, "GB")
        telling.figure(f"{tokens:,} tokens, over the arithmetic", found / expected, at_most=MOST)
        telling.figure(f"{tokens:,} tokens, forward and backward", 1000 * taken, "ms")


def train(telling: Telling) -> None:
    """A step of the trainer in bfloat16, with as many layers as the card has room for."""
    from rl_bridge.config import AlgorithmConfig, TrainerConfig
    from rl_bridge.trainer.settings import TrainerSettings
    from rl_bridge.trainer.trainer import Trainer

    device, size = telling.device(), telling.size
    lengths = [32, 20, 32, 7] if telling.dry else [2048] * 16
    layers = _layers_that_fit(size) if device == "cuda" else None
    one = shape_of(size, layers)
    telling.figure(
        "layers", f"{one.layers} of {shape_of(size).layers}, {one.parameters / 1e9:.2f}e9 parameters"
    )
    with tempfile.TemporaryDirectory() as folder:
        policy = write_checkpoint(
            Path(folder) / "policy", size, device=device, dtype=torch.bfloat16, layers=layers
        )
        settings = TrainerSettings(
            model_path=str(policy),
            dtype="bfloat16",
            folder=folder,
            max_length=max(lengths),
            max_loss_tokens=max(lengths),
            temperature=1.0,
            seed=0,
            trainer=TrainerConfig(iterations=8, learning_rate=1e-6),
            algorithm=AlgorithmConfig(),
        )
        trainer = Trainer(settings)
    batch = documents(lengths, vocabulary=one.vocabulary)
    found = []
    for _ in range(2 if telling.dry else 4):
        trainer.step(batch)
        found.append(trainer.measured)
    for name, value in max(found[1:], key=lambda figures: figures["train/tokens_per_s"]).items():
        telling.figure(name, value)


def _layers_that_fit(size: str) -> int:
    """Within nine tenths of what is free, after what does not depend on the layers."""
    free = 0.9 * torch.cuda.mem_get_info()[0]
    layers = shape_of(size).layers
    while (
        layers > 1
        and 16 * shape_of(size, layers).parameters + 8 * shape_of(size).output_parameters + 4e9 > free
    ):
        layers -= 1
    return layers


def weights(telling: Telling) -> None:
    """Master weights in float32 on the card, through shared memory in bfloat16, onto the card again."""
    device, size, layers = telling.device(), telling.size, shape_of(telling.size).layers
    while device == "cuda" and 4.5 * shape_of(size, layers).parameters > torch.cuda.mem_get_info()[0]:
        layers -= 1
    telling.figure("layers", f"{layers} of {shape_of(size).layers}")
    state = random_weights(shape_of(size, layers), device=device, dtype=torch.float32)
    asyncio.run(_through_the_store(telling, state))


async def _through_the_store(telling: Telling, state: dict[str, Tensor]) -> None:
    from rl_bridge.weights import WeightStore
    from rl_bridge.weights.directory import WeightDirectory

    device = next(iter(state.values())).device
    sent = sum(2 * tensor.numel() for tensor in state.values())
    telling.figure("sent", sent / 1e9, "GB")
    store = WeightStore(WeightDirectory(), transport="shared_memory")
    before = _shared_memory()
    try:
        # The ring's second segment is written for the first time by the second.
        for version, which in enumerate(("first", "second", "steady")):
            began = time.perf_counter()
            await store.put(version, state, dtype=torch.bfloat16)
            taken = time.perf_counter() - began
            telling.figure(f"push, {which}", taken, "s")
            telling.figure(f"push, {which}", sent / 1e9 / taken, "GB/s")
            began, wrong = time.perf_counter(), 0
            async with store.open(version, device=device) as there:
                for name, tensor in there.items():
                    moved = tensor.to(device)
                    if which == "steady":
                        continue
                    wrong += int((moved != state[name].to(torch.bfloat16)).any())
            if which != "steady":
                telling.figure(f"tensors that came otherwise, {which}", wrong, at_most=0)
                continue
            if device.type == "cuda":
                torch.cuda.synchronize()
            taken = time.perf_counter() - began
            telling.figure("take, onto the device", taken, "s")
            telling.figure("take, onto the device", sent / 1e9 / taken, "GB/s")
        held = (_shared_memory() - before) / sent
        telling.figure("host memory, over what is sent", held, at_most=MOST_HELD)
    finally:
        await store.close()


def _shared_memory() -> int:
    """Bytes that this process has of it: the publisher's segments, and the reader's mappings of the same."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("RssShmem:"))
    return int(line.split()[1]) * 1024
