"""`python -m rl_bridge.doctor.measuring MEETING LOCAL_RANK OWNER FD`: one process of a meeting.

It writes two lines of JSON to that descriptor: who is there, and what it measured. Standard output is for libraries,
which log there, NCCL above all. Nothing of a run is used here: what fails is the network, a driver or a library.
"""

import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from typing import IO, TYPE_CHECKING

from openenv_core.sandbox.kernel.libc import die_with_parent
from rl_bridge.doctor.roll_call import (
    LARGE_TIMES,
    SAID,
    HostFacts,
    Meeting,
    MeetingError,
    call_roll,
    own_facts,
)
from rl_bridge.metrics.status import parse_address

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SMALL_TIMES = 20


def measure(meeting: Meeting, local: int, heard: Callable[[list[HostFacts]], object]) -> dict[str, object]:
    """Meet the others, check that a sum comes out right, and time collectives and the way to each other host.

    Args:
        meeting: The meeting.
        local: Which of this host's processes this one is, from 0.
        heard: Told of all hosts, before anything is computed.

    Returns:
        backend: What carried it. right: Whether the sum was. small_us: A collective of one number.
        reduce_gbps: What each rank moves while all sum `megabytes`, in 10^9 bits a second: 2 (n - 1) / n x size / time,
        the bus bandwidth of NCCL's tests. pair_gbps: From the first rank to the first rank of each other host, by the
        other's rank; on the first rank alone.

    Raises:
        MeetingError: The hosts are not those that were asked for.
        RuntimeError: They cannot compute together.
    """
    import torch
    import torch.distributed as dist

    host, port = parse_address(meeting.address)
    rank, world, timeout = _rank(meeting, local), meeting.world, timedelta(seconds=meeting.timeout_s)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        host, port, is_master=rank == 0, timeout=timeout, wait_for_workers=False
    )
    hosts = call_roll(store, meeting, own_facts(meeting), tells=local == 0)
    heard(hosts)
    on_gpu, device = all(facts.on_gpu for facts in hosts), torch.device("cpu")
    if on_gpu:
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=store,
        rank=rank,
        world_size=world,
        timeout=timeout,
    )
    try:
        # Whole numbers, which floating point adds up exactly.
        number = torch.full((1,), float(rank + 1), device=device)
        dist.all_reduce(number)
        right = number.item() == world * (world + 1) / 2
        number.zero_()
        small_s = _typical(lambda: dist.all_reduce(number), device, SMALL_TIMES)
        large = torch.zeros(meeting.megabytes << 18, device=device)  # float32
        large_s = _typical(lambda: dist.all_reduce(large), device, LARGE_TIMES)
        moved = 2 * (world - 1) / world * large.nbytes
        return {
            "backend": "nccl" if on_gpu else "gloo",
            "right": right,
            "small_us": small_s * 1e6,
            "reduce_gbps": moved * 8 / 1e9 / large_s,
            "pair_gbps": _pairs(meeting, rank, large, device),
        }
    finally:
        dist.destroy_process_group()


def _rank(meeting: Meeting, local: int) -> int:
    return meeting.node_rank * meeting.per_host + local


def _pairs(meeting: Meeting, rank: int, large: "Tensor", device: "torch.device") -> dict[int, float]:
    """Send `large` from the first rank to the first of every other host, which says when it has it."""
    import torch
    import torch.distributed as dist

    found: dict[int, float] = {}
    receipt = torch.zeros(1, device=device)
    for other in range(meeting.per_host, meeting.world, meeting.per_host):

        def exchange(other: int = other) -> None:
            if rank == 0:
                dist.send(large, other)
                dist.recv(receipt, other)
            else:
                dist.recv(large, 0)
                dist.send(receipt, 0)

        if rank in (0, other):
            seconds = _typical(exchange, device, LARGE_TIMES)
            found[other] = large.nbytes * 8 / 1e9 / seconds
        dist.barrier()
    return found if rank == 0 else {}


def _typical(work: Callable[[], object], device: "torch.device", times: int) -> float:
    """The median of so many times, in seconds, after one that does not count."""
    import torch

    taken = []
    for _ in range(times + 1):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])


def main(meeting: Meeting, local: int, owner: int, answers: IO[str]) -> int:
    """Measure and write; returns 0, or 1 where the hosts are not those that were asked for."""
    die_with_parent(signal.SIGKILL)
    if os.getppid() != owner:  # it went before; torch, which takes seconds, is imported later for that reason
        return 1

    def tell(**what: object) -> None:
        answers.write(json.dumps({"rank": _rank(meeting, local), **what}) + "\n")
        answers.flush()

    try:
        measured = measure(meeting, local, heard=lambda hosts: tell(hosts=[asdict(facts) for facts in hosts]))
        tell(measured=measured)
    except MeetingError as error:
        sys.stderr.write(f"{SAID}{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    with os.fdopen(int(sys.argv[4]), "w") as answers:
        sys.exit(main(Meeting(**json.loads(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3]), answers))
