"""Whether many sessions can play at once."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from threading import Barrier, BrokenBarrierError

from openenv_core.checker.check import CheckFailed, Level, NotApplicable, check
from openenv_core.checker.playing.compared import answered
from openenv_core.checker.semantic.seeds import repeats
from openenv_core.checker.semantic.sessions import CHANGE, Player, Trace, compared, solo, touching
from openenv_core.checker.subject import SLOT_WAIT_S, Client, Subject
from openenv_core.errors import CapacityReached
from openenv_core.targets import TargetKind

TOGETHER_S = 60.0
"""Seconds until all sessions have begun."""


@check(Level.LOAD, deadline_s=600.0)
def check_sessions_at_once(subject: Subject) -> None:
    """Many sessions at once all play to the end, and none sees another's episode."""
    if touching(subject) is not None:
        raise NotApplicable("two sessions touch each other already: see sessions_are_separate")
    with ExitStack() as stack:
        url = subject.url if subject.kind is TargetKind.URL else stack.enter_context(subject.server()).url
        wanted = min(subject.limits.sessions, subject.cap or subject.limits.sessions)
        clients = _opened(subject, stack, url, wanted)
        together = _play(subject, clients)
        for client in clients:
            client.close()
        alone = [solo(subject, number, url) for number in range(len(clients))]
    if (found := compared(alone, together, repeats(subject))) is not None:
        raise CheckFailed(
            f"expected {len(clients)} sessions at once not to see each other's episodes, got: {found}",
            change=CHANGE,
        )


def _opened(subject: Subject, stack: ExitStack, url: str, wanted: int) -> list[Client]:
    """Open as many sessions as are wanted; where the cap is not known beforehand, as many as there can be."""
    clients: list[Client] = []
    for number in range(wanted):
        client = stack.enter_context(subject.client(url))
        with answered(f"session {number + 1} of {wanted}"):
            try:
                subject.reset(client, wait_s=0.0 if number else SLOT_WAIT_S, seed=number)
            except CapacityReached as error:
                if subject.cap is not None or number < 2:
                    raise CheckFailed(
                        f"expected room for {wanted} sessions, got {number}: {error}",
                        change="let create_app's max_concurrent_envs be what the environment can bear",
                    ) from error
                client.close()
                return clients
        clients.append(client)
    return clients


def _play(subject: Subject, clients: Sequence[Client]) -> list[Trace]:
    """Play an episode in each session, all at the same time."""
    players = [Player(subject, client, number) for number, client in enumerate(clients)]
    ready = Barrier(len(players), timeout=TOGETHER_S)

    def play(player: Player) -> Trace:
        try:
            player.begin()
            ready.wait()  # every episode has begun before any goes on
            while player.step():
                pass
        except BaseException:
            ready.abort()
            raise
        return player.trace

    with ThreadPoolExecutor(len(players), thread_name_prefix="openenv-check-load") as pool:
        futures = [pool.submit(play, player) for player in players]
    failures = [error for future in futures if (error := future.exception()) is not None]
    first = next((error for error in failures if not isinstance(error, BrokenBarrierError)), None)
    if first is not None:
        with answered(f"{len(players)} episodes at once"):
            raise first
    return [future.result() for future in futures]
