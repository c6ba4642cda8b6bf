"""Processes of this host, and of others that do the same, meet and compute together: does it work, and how fast."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from operator import itemgetter
from typing import IO, Any

from rl_bridge.doctor.findings import Finding, Severity
from rl_bridge.doctor.roll_call import COMPARED, LARGE_TIMES, SAID, HostFacts, Meeting, differing
from rl_bridge.interface import is_own, name_interface
from rl_bridge.metrics.status import parse_address

WHAT = "collectives"
MEETING_MARGIN_S = 180.0
"""Beyond a meeting's own time-outs and measuring: imports, which take long where a disk is far or a machine is busy."""
POLL_INTERVAL_S = 0.05
KILL_TIMEOUT_S = 5.0
"""For a process that is killed to be gone."""
SLOW_GBPS = 0.5
"""A network as slow as this is still measured."""


def meet(meeting: Meeting) -> list[Finding]:
    """Start this host's processes, let them measure, and say what they found. Nothing of them is left afterwards."""
    environment = _environment(meeting)
    processes: list[subprocess.Popen[str]] = []
    with ExitStack() as files:
        # Files and no pipes: whoever logs a lot never has to wait for a reader.
        logged, answers = (
            files.enter_context(tempfile.TemporaryFile(mode="w+", errors="replace")) for _ in range(2)
        )
        # How long it may take to move everything over a slow network: to each host alone, and while all sum.
        once_s = meeting.megabytes * 2**20 * 8 / (SLOW_GBPS * 1e9)
        measuring_s = (LARGE_TIMES + 1) * once_s * (meeting.num_nodes + 1)
        deadline = time.monotonic() + meeting.timeout_s + MEETING_MARGIN_S + measuring_s
        try:
            for local in range(meeting.per_host):
                process = _start(meeting, local, environment, answers=answers, logged=logged)
                processes.append(process)  # at once: it is ended even where the next cannot be started
            whole = _wait(processes, deadline)
        finally:
            for process in processes:
                _end(process)
        logged.seek(0)
        answers.seek(0)
        told = sorted(map(json.loads, answers), key=itemgetter("rank"))
        facts = next(([HostFacts(**host) for host in one["hosts"]] for one in told if "hosts" in one), [])
        measured = [one["measured"] for one in told if "measured" in one]
        results = _results(meeting, facts, measured) if whole else [_failure(meeting, logged.read())]
        return [*results, *_versions(facts)]


def _start(
    meeting: Meeting, local: int, environment: Mapping[str, str], *, answers: IO[str], logged: IO[str]
) -> "subprocess.Popen[str]":
    words = (json.dumps(asdict(meeting)), str(local), str(os.getpid()), str(answers.fileno()))
    return subprocess.Popen(
        [sys.executable, "-m", "rl_bridge.doctor.measuring", *words],
        stdin=subprocess.DEVNULL,
        stdout=logged,
        stderr=logged,
        pass_fds=(answers.fileno(),),
        text=True,
        env=environment,
        start_new_session=True,
    )


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


def _end(process: "subprocess.Popen[str]") -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):  # one that hangs in a driver outlasts even that
        process.wait(KILL_TIMEOUT_S)


def _environment(meeting: Meeting) -> dict[str, str]:
    """Ours, with the interface that leads to the others."""
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    if meeting.num_nodes > 1:
        host, _ = parse_address(meeting.address)
        name_interface(environment, host)
    return environment


def _failure(meeting: Meeting, told: str) -> Finding:
    lines = [line.strip() for line in told.splitlines() if line.strip()]
    # Libraries go on logging after what went wrong has been said.
    said = next((line.removeprefix(SAID) for line in lines if line.startswith(SAID)), None)
    reason = said or next((line for line in reversed(lines) if "Error" in line), "no answer in time")
    host, _ = parse_address(meeting.address)
    if meeting.num_nodes > 1 and meeting.node_rank == 0 and not is_own(host):
        reason += f"; {host} is no address of this host, and --node_rank 0 belongs on the one that has it"
    others = (
        f"is `ropewalk doctor --num_nodes {meeting.num_nodes} --node_rank N --addr {meeting.address}` running on "
        f"every host, each with its own N and with as many processes, {meeting.per_host}, and are their ports open to "
        "each other?"
        if meeting.num_nodes > 1
        else "see what torch.distributed says"
    )
    return Finding(
        what=WHAT,
        told=(
            f"expected {meeting.world} processes to meet at {meeting.address} within {meeting.timeout_s:g} s, "
            f"they did not: {reason}; {others}"
        ),
        level=Severity.BAD,
    )


def _results(
    meeting: Meeting, facts: Sequence[HostFacts], measured: Sequence[Mapping[str, Any]]
) -> list[Finding]:
    """What this host's processes measured, the first of them before the others."""
    answer = measured[0]
    hosts = [one.host for one in facts]
    who = f"{meeting.world} processes on {meeting.num_nodes} host{'s' if meeting.num_nodes > 1 else ''}"
    if not all(one["right"] for one in measured):
        told = (
            f"{who} by {answer['backend']} got a wrong sum: see drivers and network cards, or NCCL_DEBUG=INFO"
        )
        return [Finding(what=WHAT, told=told, level=Severity.BAD)]
    if meeting.world == 1:
        told = f"one process by {answer['backend']}: it computes, and had nobody to send to"
        return [Finding(what=WHAT, told=told)]
    told = (
        f"{who} ({', '.join(hosts)}) by {answer['backend']}: {answer['small_us']:.0f} us for one number, "
        f"{answer['reduce_gbps']:.1f} Gbps while all sum {meeting.megabytes} MiB"
    )
    metrics = {name: answer[name] for name in ("small_us", "reduce_gbps")}
    return [
        Finding(what=WHAT, told=told, metrics=metrics),
        *(
            Finding(
                what=f"to {hosts[int(rank) // meeting.per_host]}",
                told=f"{gbps:.1f} Gbps, from here",
                metrics={"pair_gbps": gbps},
            )
            for rank, gbps in answer["pair_gbps"].items()
        ),
    ]


def _versions(facts: Sequence[HostFacts]) -> Iterator[Finding]:
    if len(facts) < 2:
        return
    what = "versions on all hosts"
    found = differing(facts)
    for name, versions in found.items():
        told = "; ".join(f"{version} on {', '.join(hosts)}" for version, hosts in versions.items())
        yield Finding(what=what, told=f"expected one of {name}, got {told}", level=Severity.BAD)
    if not found:
        yield Finding(what=what, told=f"the same, as far as several have {', '.join(COMPARED)}")
