"""Snapshots in shared memory, between real processes."""

import gc
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rl_bridge.errors import SnapshotOverwritten, WeightsError
from rl_bridge.weights import SharedMemoryPublisher, SnapshotHandle, read_snapshot
from rl_bridge.weights.snapshot import ALIGNMENT


@pytest.fixture
def publisher() -> Iterator[SharedMemoryPublisher]:
    with SharedMemoryPublisher() as one:
        yield one


def state_of(value: float, *, size: int = 8) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((size,), value), "bias": torch.full((3,), -value)}


def assert_same(read: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(read) == list(expected)
    for name, tensor in expected.items():
        assert read[name].dtype == tensor.dtype
        assert read[name].shape == tensor.shape
        assert torch.equal(read[name], tensor)


VARIETY = {
    "float32": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "bfloat16": torch.tensor([1.5, -2.0, 1e-8], dtype=torch.bfloat16),
    "float16": torch.tensor([[0.25]], dtype=torch.float16),
    "float64": torch.tensor([1 / 3, float("inf")], dtype=torch.float64),
    "int64": torch.tensor([-(2**62), 7]),
    "bool": torch.tensor([True, False, True]),
    "scalar": torch.tensor(2.5),
    "zero rows": torch.zeros(0, 7),
    "transposed": torch.arange(6.0).reshape(2, 3).T,
    "strided": torch.arange(10.0)[::3],
    "expanded": torch.tensor([[1.0], [2.0]]).expand(2, 4),
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "last and empty": torch.zeros(0),
}


def test_everything_comes_back_as_it_was(publisher: SharedMemoryPublisher) -> None:
    handle = publisher.publish(3, VARIETY)
    assert handle.version == 3
    read = read_snapshot(handle)
    assert_same(read, VARIETY)
    assert not any(tensor.requires_grad for tensor in read.values())
    assert all(spec.offset % ALIGNMENT == 0 for spec in handle.tensors.values())


def test_what_was_read_belongs_to_the_reader(publisher: SharedMemoryPublisher) -> None:
    handle = publisher.publish(0, state_of(1.0))
    first = read_snapshot(handle)
    first["weight"].zero_()
    assert_same(read_snapshot(handle), state_of(1.0))


def test_a_snapshot_does_not_follow_the_weights(publisher: SharedMemoryPublisher) -> None:
    weights = state_of(1.0)
    handle = publisher.publish(0, weights)
    for tensor in weights.values():
        tensor.mul_(100)
    assert_same(read_snapshot(handle), state_of(1.0))


@pytest.mark.parametrize("depth", [2, 4])
def test_snapshots_stay_readable_for_the_depth_of_the_ring(depth: int) -> None:
    with SharedMemoryPublisher(depth=depth) as publisher:
        handles = [publisher.publish(version, state_of(float(version))) for version in range(depth)]
        for version, handle in enumerate(handles):
            assert_same(read_snapshot(handle), state_of(float(version)))
        newest = publisher.publish(depth, state_of(float(depth)))
        with pytest.raises(SnapshotOverwritten, match="version 0 "):
            read_snapshot(handles[0])
        for version, handle in enumerate([*handles[1:], newest], start=1):
            assert_same(read_snapshot(handle), state_of(float(version)))


def test_a_handle_never_reads_another_layout(publisher: SharedMemoryPublisher) -> None:
    # The segment is made anew for a state of another size, and may get the old one's descriptor.
    old = publisher.publish(0, state_of(1.0))
    publisher.publish(1, state_of(2.0))
    publisher.publish(2, state_of(3.0, size=1024))
    with pytest.raises(WeightsError):
        read_snapshot(old)


def test_a_handle_never_reads_another_publisher() -> None:
    with SharedMemoryPublisher() as first:
        old = first.publish(0, state_of(1.0))
    with SharedMemoryPublisher() as second:
        new = second.publish(0, state_of(2.0))
        assert new.fd == old.fd, "the descriptor was meant to be reused, or this test shows nothing"
        with pytest.raises(WeightsError):
            read_snapshot(old)
        assert_same(read_snapshot(new), state_of(2.0))


def test_a_closed_publisher_is_told_apart(publisher: SharedMemoryPublisher) -> None:
    handle = publisher.publish(5, state_of(1.0))
    publisher.close()
    with pytest.raises(WeightsError, match="version 5"):
        read_snapshot(handle)
    with pytest.raises(WeightsError, match="closed"):
        publisher.publish(6, state_of(2.0))
    publisher.close()  # once more does no harm


def test_an_empty_state_is_refused(publisher: SharedMemoryPublisher) -> None:
    with pytest.raises(WeightsError, match="at least one tensor"):
        publisher.publish(0, {})


def test_a_ring_of_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        SharedMemoryPublisher(depth=1)


def test_handles_travel(publisher: SharedMemoryPublisher) -> None:
    handle = publisher.publish(1, state_of(4.0))
    assert pickle.loads(pickle.dumps(handle)) == handle


def test_memory_is_given_back() -> None:
    def segments() -> int:
        links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        return len({link.stat().st_ino for link in links if "ropewalk-weights" in os.readlink(link)})

    gc.collect()
    before = segments()
    with SharedMemoryPublisher(depth=3) as publisher:
        for version in range(7):
            handle = publisher.publish(version, state_of(1.0, size=64 + version))
            read_snapshot(handle)
        assert segments() == before + 3
    assert segments() == before


def test_another_process_reads_it(publisher: SharedMemoryPublisher, tmp_path: Path) -> None:
    handle = publisher.publish(9, VARIETY)
    result = tmp_path / "read.pt"
    script = (
        "import pickle, sys, torch\n"
        "from rl_bridge.weights import read_snapshot\n"
        "state = read_snapshot(pickle.load(sys.stdin.buffer))\n"
        "torch.save({name: tensor.clone() for name, tensor in state.items()}, sys.argv[1])\n"
    )
    subprocess.run([sys.executable, "-c", script, str(result)], input=pickle.dumps(handle), check=True)
    assert_same(torch.load(result), {name: tensor.detach() for name, tensor in VARIETY.items()})


PUBLISHING = """
import pickle, sys, time, torch
from rl_bridge.weights import SharedMemoryPublisher
publisher = SharedMemoryPublisher()
pickle.dump(publisher.publish(1, {"weight": torch.ones(1 << 20)}), sys.stdout.buffer)
sys.stdout.buffer.flush()
time.sleep(600)
"""


def test_a_killed_publisher_leaves_nothing() -> None:
    shared = Path("/dev/shm")
    before = set(shared.iterdir())
    with subprocess.Popen([sys.executable, "-c", PUBLISHING], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            handle: SnapshotHandle = pickle.load(process.stdout)
            assert torch.equal(read_snapshot(handle)["weight"], torch.ones(1 << 20))
            assert set(shared.iterdir()) == before
        finally:
            process.send_signal(signal.SIGKILL)
    with pytest.raises(WeightsError, match="is its publisher alive"):
        read_snapshot(handle)
    assert set(shared.iterdir()) == before


def _read_until_stopped(
    handles: multiprocessing.connection.Connection, results: multiprocessing.connection.Connection
) -> None:
    whole = overwritten = 0
    mixtures: list[str] = []
    while (handle := handles.recv()) is not None:
        for _ in range(3):
            try:
                tensors = read_snapshot(handle)
            except SnapshotOverwritten:
                overwritten += 1
                continue
            values = {float(value) for tensor in tensors.values() for value in tensor.unique()}
            if values == {float(handle.version)}:
                whole += 1
            else:
                mixtures.append(f"version {handle.version} read as {sorted(values)}")
    results.send((whole, overwritten, mixtures))


def test_a_reader_never_takes_a_mixture_for_a_version() -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    reader = context.Process(target=_read_until_stopped, args=(theirs, theirs))
    reader.start()
    try:
        state = {f"layer {number}": torch.zeros(1 << 15) for number in range(4)}
        with SharedMemoryPublisher() as publisher:
            for version in range(1, 240):
                for tensor in state.values():
                    tensor.fill_(version)
                handle = publisher.publish(version, state)
                if version % 8 == 0:  # the reader keeps falling behind, then catches up
                    ours.send(handle)
            ours.send(publisher.publish(240, {name: torch.full((1 << 15,), 240.0) for name in state}))
            ours.send(None)
            whole, overwritten, mixtures = ours.recv()  # the ring must stay until the reader is through
    finally:
        reader.join(30)
        reader.kill()
    assert mixtures == []
    assert whole >= 3, "the last snapshot stays: it can be read"
    assert overwritten > 0, "the publisher never overtook the reader: the test shows nothing"


def test_a_reader_in_a_thread_never_takes_a_mixture_for_a_version(publisher: SharedMemoryPublisher) -> None:
    newest = publisher.publish(0, {"a": torch.zeros(1 << 16), "b": torch.zeros(1 << 16)})
    stop = threading.Event()
    mixtures: list[str] = []
    reads = 0

    def read() -> None:
        nonlocal reads
        while not stop.is_set():
            handle = newest
            try:
                tensors = read_snapshot(handle)
            except SnapshotOverwritten:
                continue
            reads += 1
            values = {float(value) for tensor in tensors.values() for value in tensor.unique()}
            if values != {float(handle.version)}:
                mixtures.append(f"version {handle.version} read as {sorted(values)}")

    thread = threading.Thread(target=read)
    thread.start()
    version = 0
    try:
        while reads < 50:
            version += 1
            newest = publisher.publish(
                version, {name: torch.full((1 << 16,), float(version)) for name in ("a", "b")}
            )
    finally:
        stop.set()
        thread.join()
    assert mixtures == []


def test_a_state_that_cannot_be_copied_does_not_poison_the_ring(publisher: SharedMemoryPublisher) -> None:
    keeper = publisher.publish(0, state_of(1.0))
    broken = {"weight": torch.empty(8, device="meta"), "bias": torch.zeros(3)}
    with pytest.raises(Exception, match="meta"):
        publisher.publish(1, broken)
    gc.collect()
    assert_same(read_snapshot(keeper), state_of(1.0))
    for version in (2, 3):
        assert_same(read_snapshot(publisher.publish(version, state_of(5.0))), state_of(5.0))
