"""Checks that need torch only: the software stack, the card, and the last layer."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.gpu.child import Reporter

GIB = 1 << 30


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
        reason = (
            "it is built without CUDA" if torch.version.cuda is None else "is the driver as new as its CUDA?"
        )
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
    from benchmarks.loss import CHUNK, MOST, VOCABULARY, arithmetic, peak, peak_on_gpu

    if reporter.device() == "cpu":
        expected = arithmetic(vocabulary=8192, chunk=CHUNK)
        for tokens in (1024, 2048):
            peak_bytes = peak(tokens, vocabulary=8192, chunk=CHUNK)
            reporter.record(f"{tokens:,} tokens, over the arithmetic", peak_bytes / expected, at_most=MOST)
        return
    width, dtype = 1024, torch.bfloat16
    expected = arithmetic(vocabulary=VOCABULARY, chunk=CHUNK, width=width, dtype=dtype)
    reporter.record("by arithmetic", expected / 1e9, "GB")
    for tokens in (4096, 16_384, 32_768):
        peak_bytes, elapsed_s = peak_on_gpu(
            tokens, vocabulary=VOCABULARY, chunk=CHUNK, width=width, dtype=dtype
        )
        reporter.record(f"{tokens:,} tokens", peak_bytes / 1e9, "GB")
        reporter.record(f"{tokens:,} tokens, over the arithmetic", peak_bytes / expected, at_most=MOST)
        reporter.record(f"{tokens:,} tokens, forward and backward", 1000 * elapsed_s, "ms")
