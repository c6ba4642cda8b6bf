"""Copies of many tensors, by a few threads: one alone does not use what memory a machine has to offer."""

import os
from collections import deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache

from torch import Tensor

MAX_THREADS = 4
WORTH_A_THREAD = 1 << 20
"""Bytes; less is copied sooner than another thread has woken."""


def copy_all(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy each second tensor into the first, which is of its shape. Returns when no thread copies any more."""
    waiting = deque(sorted(pairs, key=lambda pair: pair[0].nbytes, reverse=True))
    threads = min(_threads(), 1 + sum(target.nbytes for target, _ in waiting) // WORTH_A_THREAD)
    helpers = [_pool().submit(_copy, waiting) for _ in range(threads - 1)]
    try:
        _copy(waiting)
    finally:
        waiting.clear()
        wait(helpers)
    for helper in helpers:
        helper.result()


def _copy(waiting: deque[tuple[Tensor, Tensor]]) -> None:
    while waiting:
        try:
            target, source = waiting.popleft()
        except IndexError:  # another thread was quicker
            return
        target.copy_(source)


def _threads() -> int:
    return min(MAX_THREADS, len(os.sched_getaffinity(0)))


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_threads(), thread_name_prefix="weights")
