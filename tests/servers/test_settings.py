"""Server settings from environment variables, and slots counted over worker processes."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from openenv_core import ConfigurationError
from openenv_core.protocol.errors import RefusalError
from servers.fleet.slots import SharedSlots, SlotTable
from servers.metrics import SharedCounts
from servers.sessions import SlotQueue
from servers.settings import ServerSettings

TOKEN = "correct-horse-battery-staple"


def test_every_setting_has_an_environment_variable(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(f"# comment\n\n  {TOKEN}  \n")
    environ = {
        "ROPEWALK_TOKENS": "first-token-of-good-length,second-token-of-good-length",
        "ROPEWALK_TOKEN_FILE": str(file),
        "ROPEWALK_ALLOWED_HOSTS": "a.example.org, *.example.com",
        "ROPEWALK_ALLOWED_ORIGINS": "https://example.org",
        "ROPEWALK_MAX_BODY_BYTES": "1000",
        "ROPEWALK_MAX_SESSIONS": "3",
        "ROPEWALK_MAX_SESSIONS_PER_TOKEN": "2",
        "ROPEWALK_STEP_TIMEOUT": "0",
        "ROPEWALK_IDLE_TIMEOUT": "5.5",
        "ROPEWALK_DRAIN": "1",
        "OPENENV_MODE": "Production",
    }
    assert ServerSettings.from_environment(environ) == ServerSettings(
        tokens=("first-token-of-good-length", "second-token-of-good-length", TOKEN),
        allowed_hosts=("a.example.org", "*.example.com"),
        allowed_origins=("https://example.org",),
        max_body_bytes=1000,
        max_sessions=3,
        max_sessions_per_token=2,
        step_timeout_s=None,
        idle_timeout_s=5.5,
        drain_s=1.0,
        mode="production",
    )

    empty = {"ROPEWALK_MAX_SESSIONS": " ", "OPENENV_MODE": ""}
    assert ServerSettings.from_environment(empty) == ServerSettings()


def test_invalid_values_are_refused_without_showing_tokens() -> None:
    for name, value in (
        ("ROPEWALK_TOKENS", "short"),
        ("ROPEWALK_TOKENS", "not-ascii-but-l\u00f6ng-enough"),
        ("ROPEWALK_TOKEN_FILE", "/no/such/file"),
        ("ROPEWALK_MAX_BODY_BYTES", "-1"),
        ("ROPEWALK_MAX_SESSIONS", "many"),
        ("ROPEWALK_STEP_TIMEOUT", "nan"),
        ("ROPEWALK_IDLE_TIMEOUT", "-1"),
        ("ROPEWALK_DRAIN", "inf"),
        ("OPENENV_MODE", "test"),
    ):
        with pytest.raises(ConfigurationError) as refused:
            ServerSettings.from_environment({name: value})
        assert "expected" in str(refused.value), name
        assert "short" not in str(refused.value)
    assert TOKEN not in repr(ServerSettings(tokens=(TOKEN,)))


@pytest.fixture
def fd() -> Iterator[int]:
    """The file of a table of slots: two workers, two owners, four waiting requests."""
    fd = SlotTable.create(2, 2, 4)
    yield fd
    os.close(fd)


def seen_by(fd: int, worker: int, local: int = 9) -> SharedSlots:
    table = SlotTable(os.dup(fd), 2, 2, 4)
    return SharedSlots(table, worker=worker, owners=("a", "b"), total=4, local=local, per_owner=3)


def test_slots_are_counted_over_all_workers(fd: int) -> None:
    one, other = seen_by(fd, 0), seen_by(fd, 1)
    one.acquire("a")
    other.acquire("a")
    one.acquire("a")
    with pytest.raises(RefusalError, match="of this token: 3 of 3"):
        other.acquire("a")
    other.acquire("b")
    with pytest.raises(RefusalError, match="no free session: 4 of 4"):
        one.acquire("b")
    assert one.active == other.active == 4
    other.release("b")
    one.acquire("b")
    SlotTable(fd, 2, 2, 4).clear(0)
    assert other.active == 1


def test_mapped_files_are_allocated_so_that_a_full_disk_later_kills_no_worker() -> None:
    for fd in (SlotTable.create(2, 2, 4096), SharedCounts.create(2)):
        with os.fdopen(fd) as file:
            status = os.fstat(file.fileno())
            assert 0 < status.st_size <= status.st_blocks * 512


def test_full_worker_finds_one_with_a_free_slot(fd: int) -> None:
    one, other = seen_by(fd, 0, local=1), seen_by(fd, 1, local=1)
    assert (one.cap, one.find_free_worker()) == (1, None)
    one.acquire("a")
    assert (one.find_free_worker(), other.find_free_worker()) == (1, None)
    other.acquire("a")
    assert (one.find_free_worker(), other.find_free_worker()) == (None, None)
    with pytest.raises(RefusalError, match="in this worker process"):
        one.acquire("a")


async def test_batch_waiting_for_slots_is_not_overtaken_at_another_worker(fd: int) -> None:
    queues = [SlotQueue(seen_by(fd, worker, local=4), 4, 600.0) for worker in range(2)]
    held = [queues[0].enter(owner) for owner in "aaab"]
    several, one = queues[0].enter("b", 2), queues[1].enter("a")
    held[0].leave()
    queues[1].grant_slots()
    assert not one.holds_slots
    held[3].leave()
    assert several.holds_slots
    assert not one.holds_slots
    for ticket in (*held, several, one):
        ticket.leave()


async def test_ticket_with_an_immediate_slot_is_not_counted_as_waiting(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots, counted, dequeue = seen_by(fd, 0), list[tuple[int, int]](), SlotTable.dequeue

    def note(table: SlotTable, worker: int, arrival: int) -> None:
        dequeue(table, worker, arrival)
        counted.append((slots.waiting, slots.active))

    monkeypatch.setattr(SlotTable, "dequeue", note)
    queue = SlotQueue(slots, 4, 600.0)
    ticket = queue.enter("a")
    assert ticket.holds_slots
    assert counted[0] == (0, 0)  # it leaves the queue before its slot is counted
    assert (queue.capacity()["in_use"], queue.capacity()["waiting"]) == (1, 0)
    ticket.leave()


async def test_queue_is_bounded_over_all_workers(fd: int) -> None:
    queues = [SlotQueue(seen_by(fd, worker, local=3), 4, 600.0) for worker in range(2)]
    held = [queues[number % 2].enter(owner) for number, owner in enumerate("aabb")]
    waiting = [queues[0].enter("a") for _ in range(4)]
    late = [queue.enter("b") for queue in queues for _ in range(2)]
    queues[1].record_return(60.0)  # one of four comes back every quarter of a minute, wherever it is
    assert queues[1].estimate_wait_s(2) == pytest.approx(30, rel=0.1)
    assert [ticket.is_waiting for ticket in (*waiting, *late)] == [True] * 4 + [False] * 4
    for ticket in (*waiting, *held):
        ticket.leave()


def test_frozen_process_with_the_lock_blocks_no_other(fd: int) -> None:
    program = (
        "import sys, time; from servers.fleet.slots import SlotTable\n"
        "with SlotTable(int(sys.argv[1]), 2, 2, 4).hold_lock(): print('held', flush=True); time.sleep(600)\n"
    )
    command = [sys.executable, "-c", program, str(fd)]
    with subprocess.Popen(command, pass_fds=(fd,), stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        try:
            assert holder.stdout.readline() == b"held\n"
            slots = seen_by(fd, 0)
            for _ in range(3):
                slots.acquire("a")
            with pytest.raises(RefusalError, match="of this token: 3 of 3"):
                slots.acquire("a")
            slots.release("a")
        finally:
            holder.kill()
    slots.acquire("a")
    assert slots.active == 3


@pytest.mark.slow
def test_many_processes_never_exceed_the_cap() -> None:
    """Four processes take and release a slot a thousand times each, and check the total while they hold it."""
    fd = SlotTable.create(4, 1, 4)
    program = (
        "import sys; from servers.fleet.slots import *; from openenv_core.protocol.errors import RefusalError\n"
        "fd, worker = map(int, sys.argv[1:])\n"
        "table = SlotTable(fd, 4, 1, 4)\n"
        "slots = SharedSlots(table, worker=worker, owners=('',), total=2, local=2,"
        " per_owner=None)\n"
        "taken = 0\n"
        "while taken < 1000:\n"
        "    try: slots.acquire('')\n"
        "    except RefusalError: continue\n"
        "    with table.hold_lock(): assert slots.active <= 2\n"
        "    taken += 1\n"
        "    slots.release('')\n"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", program, str(fd), str(worker)], pass_fds=(fd,))
        for worker in range(4)
    ]
    assert [process.wait(60) for process in processes] == [0] * 4
    assert sum(map(sum, SlotTable(fd, 4, 1, 4).counts)) == 0
