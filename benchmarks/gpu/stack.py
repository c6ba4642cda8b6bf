"""Checks that need torch only: the software stack, the card, and the last layer."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.gpu.child import Reporter
from benchmarks.processes import own_memory, reset_own_peak

GIB = 1 << 30
VOCABULARY, CHUNK = 151_936, 1024
MOST = 1.15
"""Bound on the peak memory of the last layer, as a multiple of the value computed by arithmetic."""


def seconds(work: Callable[[], object], *, times: int = 5) -> float:
    """Return the median duration of `times` calls, after one call that warms up."""
    durations = []
    for _ in range(times + 1):
        began = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        durations.append(time.perf_counter() - began)
    return sorted(durations[1:])[times // 2]


def versions(reporter: Reporter) -> None:
    """Record the versions of the stack, the card, its accuracy, and the speed of matrix products and copies."""
    reporter.record("python", sys.version.split()[0])
    reporter.record("torch", torch.__version__)
    reporter.record("torch's CUDA", str(torch.version.cuda))
    try:
        from rl_bridge.doctor.host import check_packages
    except ModuleNotFoundError as error:
        reporter.record("packages", f"not looked at: {error}")
    else:
        for finding in list(check_packages())[1:]:
            reporter.record(finding.what, finding.told)
    query = "nvidia-smi --query-gpu=driver_version --format=csv,noheader"
    try:
        driver = subprocess.run(query.split(), capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        driver = f"nvidia-smi does not say: {error}"
    reporter.record("driver", driver.strip())
    if not reporter.dry and not torch.cuda.is_available():
        reason = "is the driver as new as its CUDA?" if torch.version.cuda else "it is built without CUDA"
        raise RuntimeError(f"torch {torch.__version__} sees no GPU: {reason}")
    device, size = reporter.device(), 256 if reporter.dry else 8192
    if device == "cuda":
        card = torch.cuda.get_device_properties(0)
        reporter.record("card", f"{card.name}, {card.total_memory / GIB:.1f} GiB, {card.major}.{card.minor}")
        reporter.record("bf16", str(torch.cuda.is_bf16_supported(including_emulation=False)))
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    exact = a[:64].cpu().double() @ b.cpu().double()
    error_ = ((a @ b)[:64].cpu().double() - exact).norm() / exact.norm()
    reporter.record("bf16 product, relative error", float(error_), at_most=0.01)
    flops = 2 * size**3 / seconds(lambda: a @ b)
    reporter.record("bf16 products", flops / 1e12, "TFLOP/s")
    if device == "cuda":
        with contextlib.suppress(ModuleNotFoundError):  # the table of peaks is TorchTitan's
            from rl_bridge.trainer.metrics import peak_flops

            if (peak := peak_flops(torch.cuda.get_device_name())) is not None:
                reporter.record("of its peak", flops / peak)
        on_device = torch.empty(GIB, dtype=torch.uint8, device=device)
        for name, host in (("pageable", on_device.cpu()), ("pinned", on_device.cpu().pin_memory())):
            onto, back = (seconds(partial(a.copy_, b)) for a, b in ((on_device, host), (host, on_device)))
            reporter.record(f"{name} memory to the card", GIB / 1e9 / onto, "GB/s")
            reporter.record(f"the card to {name} memory", GIB / 1e9 / back, "GB/s")


def loss(reporter: Reporter) -> None:
    """Measure the last layer's memory at Qwen3's vocabulary size; it must not grow with the number of tokens."""
    all_tokens: tuple[int, ...]
    if (device := reporter.device()) == "cpu":
        vocabulary, width, dtype, all_tokens = 8192, 64, torch.float32, (1024, 2048)
        torch.set_num_threads(1)
    else:
        vocabulary, width, dtype, all_tokens = VOCABULARY, 1024, torch.bfloat16, (4096, 16_384, 32_768)
    # Two float32 tensors the size of a chunk's logits, and the output layer's gradient. It is summed in float32; if the
    # layer has a narrower dtype, a copy in that dtype exists as well.
    narrow = 0 if dtype == torch.float32 else dtype.itemsize
    expected = 2 * CHUNK * vocabulary * 4 + vocabulary * width * (4 + narrow)
    reporter.record("by arithmetic", expected / 1e9, "GB")
    for tokens in all_tokens:
        hidden, weight = (torch.randn(n, width, dtype=dtype, device=device) for n in (tokens, vocabulary))
        target = torch.randint(0, vocabulary, (tokens,), device=device)
        _loss_pass(
            hidden[:2], weight[:64], target[:2] % 64
        )  # a small one before, so that everything is loaded
        before, began = _memory(device), time.perf_counter()
        _loss_pass(hidden, weight, target)
        peak = _memory(device, peak=True) - before
        reporter.record(f"{tokens:,} tokens", peak / 1e9, "GB")
        reporter.record(f"{tokens:,} tokens, over the arithmetic", peak / expected, at_most=MOST)
        reporter.record(f"{tokens:,} tokens, forward and backward", 1e3 * (time.perf_counter() - began), "ms")


def _loss_pass(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> None:
    from rl_bridge.algorithms.logprobs import token_logprobs

    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    logprobs, entropy = token_logprobs(hidden, weight, target, temperature=0.7, chunk=CHUNK)
    (logprobs.mean() - 0.1 * entropy.mean()).backward()  # type: ignore[no-untyped-call]


def _memory(device: str, *, peak: bool = False) -> int:
    """Return the bytes in use, from which the next peak counts; or the peak since then."""
    if device == "cpu":
        if not peak:
            reset_own_peak()
        return own_memory("VmHWM" if peak else "VmRSS")
    torch.cuda.synchronize()
    if not peak:
        torch.cuda.reset_peak_memory_stats()
    return torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()
