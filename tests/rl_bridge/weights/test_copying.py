"""Many tensors are copied by several threads, each once, and none goes on when it is over."""

import threading
import time
from typing import ClassVar

import pytest
import torch

from rl_bridge.weights import copying
from rl_bridge.weights.copying import copy_all


@pytest.fixture(autouse=True)
def _three_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "_threads", lambda: 3)
    copying._pool.cache_clear()


class Noted(torch.Tensor):
    """A tensor that notes which thread copies into it."""

    threads: ClassVar[set[str]] = set()

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> "Noted":
        Noted.threads.add(threading.current_thread().name)
        time.sleep(0.01)
        torch.Tensor.copy_(self, source, non_blocking)
        return self


def test_everything_is_copied_and_by_several_threads() -> None:
    Noted.threads.clear()
    sources = [torch.full((size,), float(size)) for size in (1, 400_000, 0, 300_000, 5, 200_000)]
    targets = [torch.zeros_like(source).as_subclass(Noted) for source in sources]
    copy_all(zip(targets, sources, strict=True))
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target.as_subclass(torch.Tensor), source)
    assert len(Noted.threads) == 3


def test_little_is_copied_by_the_caller_alone() -> None:
    Noted.threads.clear()
    target = torch.zeros(8).as_subclass(Noted)
    copy_all([(target, torch.ones(8)), (target, torch.ones(8))])
    assert Noted.threads == {threading.current_thread().name}
    copy_all([])


def test_an_error_is_raised_when_no_thread_copies_any_more() -> None:
    sources = [torch.ones(1 << 20) for _ in range(6)]
    targets = [torch.zeros(1 << 20).as_subclass(Noted) for _ in sources]
    pairs = [(torch.zeros(2 << 20), torch.ones(3)), *zip(targets, sources, strict=True)]
    with pytest.raises(RuntimeError, match="size"):
        copy_all(pairs)
    before = [float(target.as_subclass(torch.Tensor)[-1]) for target in targets]
    time.sleep(0.05)
    assert [float(target.as_subclass(torch.Tensor)[-1]) for target in targets] == before
