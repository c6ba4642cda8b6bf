"""Resource limits, against what they should stop."""

import os
import resource
import threading
from contextlib import suppress

import pytest
from interpreters import in_process, outcome

from openenv_core.sandbox.kernel import identity, limits


@pytest.mark.skipif(identity.session_uid(0) is None, reason="needs the right to change uids")
def test_process_limit_counts_processes_and_threads() -> None:
    users = identity.UserLeases()  # users that no sandbox on this machine has
    (slot, uid), (other_slot, other) = users.acquire(), users.acquire()
    assert uid is not None
    assert other is not None

    def inside() -> list[object]:
        identity.drop_to(uid, uid)
        # This process may have many descriptors open already.
        limits.apply_rlimits(memory_bytes=64 << 20, file_bytes=1 << 16, open_files=4096, processes=4)
        running = threading.Event()
        started = 1
        try:
            for _ in range(10):
                threading.Thread(target=running.wait, daemon=True).start()
                started += 1
        except RuntimeError:
            pass
        counted = limits.count_tasks(uid)
        running.set()
        return [started, counted, limits.count_tasks(other)]

    assert in_process(inside) == [4, 4, 0]
    users.release(slot)
    users.release(other_slot)


def test_unreadable_tasks_are_counted() -> None:
    def inside() -> list[str]:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
        taken: list[int] = []
        with suppress(OSError):
            while True:
                taken.append(os.dup(0))
        none_left = outcome(lambda: limits.count_tasks(os.getuid()))
        os.close(taken.pop())  # one descriptor lists /proc, and none is left to look at what it lists
        return [none_left, outcome(lambda: limits.count_tasks(os.getuid()))]

    assert in_process(inside) == ["OSError", "OSError"]


def test_footprint_is_read_through_a_proc_descriptor() -> None:
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)

    def inside() -> bool:
        for _ in range(1000):  # reading may itself take memory
            before, by_descriptor, after = (vars(limits.footprint(each)) for each in (None, proc, None))
            if before == after:
                return by_descriptor == before
        return False

    try:
        assert in_process(inside, descriptors=(proc,))
    finally:
        os.close(proc)
    footprint = limits.footprint()
    assert footprint.address_space > footprint.data > 1 << 20


def test_threads_share_one_malloc_arena() -> None:
    def inside() -> int:
        limits.one_arena()
        before = limits.footprint().address_space
        threading.stack_size(256 << 10)
        barrier = threading.Barrier(9)

        def work() -> None:
            bytearray(100_000)
            "x".join(str(number) for number in range(1000))
            barrier.wait()
            barrier.wait()

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        barrier.wait()
        grown = limits.footprint().address_space - before
        barrier.wait()
        for thread in threads:
            thread.join()
        return grown

    # Each arena would have reserved 64 MiB.
    assert in_process(inside) < 64 << 20
