"""`python -m benchmarks.loss`: peak memory of the last layer and its gradient, which must depend on the chunk only."""

import argparse
import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from rl_bridge.algorithms.logprobs import token_logprobs

VOCABULARY, WIDTH, CHUNK = 151_936, 64, 1024
TOKENS = (1024, 4096, 16_384)
MOST = 1.15
"""Bound on the peak memory of a pass, as a multiple of the value computed by `arithmetic`."""


def arithmetic(*, vocabulary: int, chunk: int, width: int = WIDTH, dtype: torch.dtype = torch.float32) -> int:
    """Return the expected bytes: two float32 tensors the size of a chunk's logits, and the output layer's gradient.

    The gradient is summed in float32; if the layer has a narrower dtype, a copy in that dtype exists as well.
    """
    narrow = 0 if dtype == torch.float32 else dtype.itemsize
    return 2 * chunk * vocabulary * 4 + vocabulary * width * (4 + narrow)


def peak(tokens: int, *, vocabulary: int, chunk: int) -> int:
    """Return the peak bytes that a forward and backward pass adds, measured in a separate process."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_measure, args=(tokens, vocabulary, chunk, theirs))
    process.start()
    theirs.close()
    peak_bytes: int = ours.recv()
    process.join()
    return peak_bytes


def _measure(
    tokens: int, vocabulary: int, chunk: int, end: "multiprocessing.connection.Connection[int, object]"
) -> None:
    torch.set_num_threads(1)
    run_pass = one_pass(tokens, vocabulary=vocabulary, chunk=chunk)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _status("VmRSS")
    run_pass()
    end.send(_status("VmHWM") - before)


def peak_on_gpu(
    tokens: int, *, vocabulary: int, chunk: int, width: int, dtype: torch.dtype
) -> tuple[int, float]:
    """Return the peak bytes that a pass adds on this process's GPU, and its duration in seconds."""
    run_pass = one_pass(tokens, vocabulary=vocabulary, chunk=chunk, width=width, dtype=dtype, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, began = torch.cuda.memory_allocated(), time.perf_counter()
    run_pass()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before, time.perf_counter() - began


def one_pass(
    tokens: int,
    *,
    vocabulary: int,
    chunk: int,
    width: int = WIDTH,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Callable[[], None]:
    """Return a function that runs a pass. A small pass has run before, so that everything is loaded."""
    options: dict[str, Any] = {"dtype": dtype, "device": device}
    hidden = torch.randn(tokens, width, **options).requires_grad_()
    weight = torch.randn(vocabulary, width, **options).requires_grad_()
    target = torch.randint(0, vocabulary, (tokens,), device=device)
    _pass(hidden[:2].detach().requires_grad_(), weight[:64].detach().requires_grad_(), target[:2] % 64, chunk)
    return lambda: _pass(hidden, weight, target, chunk)


def _pass(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, chunk: int) -> None:
    logprobs, entropy = token_logprobs(hidden, weight, target, temperature=0.7, chunk=chunk)
    (logprobs.mean() - 0.1 * entropy.mean()).backward()  # type: ignore[no-untyped-call]


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"no {name} in /proc/self/status")


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table; returns 1 if a pass exceeds the bound."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.loss", description=(__doc__ or "").partition(": ")[2]
    )
    parser.add_argument("--quick", action="store_true", help="tiny numbers, which only show that it runs")
    quick = parser.parse_args(argv).quick
    vocabulary, chunk = VOCABULARY, CHUNK // 4 if quick else CHUNK
    expected, met = arithmetic(vocabulary=vocabulary, chunk=chunk), True
    print(f"vocabulary {vocabulary:,}, {chunk} tokens a chunk: by arithmetic {expected / 1e9:.2f} GB\n")
    print("| loss tokens | peak GB | / arithmetic |\n|---|---|---|")
    for tokens in TOKENS[: 2 if quick else None]:
        peak_bytes = peak(tokens, vocabulary=vocabulary, chunk=chunk)
        met = met and peak_bytes <= MOST * expected
        print(f"| {tokens:,} | {peak_bytes / 1e9:.2f} | {peak_bytes / expected:.2f} |", flush=True)
    print(f"\nat most {MOST}: {'met' if met else 'NOT MET'}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
