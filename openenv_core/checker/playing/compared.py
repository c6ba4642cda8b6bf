"""Episodes that are to be the same, wherever they are played."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from openenv_core.checker.check import CheckFailed
from openenv_core.checker.outcomes import cause_of
from openenv_core.checker.playing.instance import EPISODE_ID, LocalSession
from openenv_core.checker.playing.parting import Result
from openenv_core.checker.subject import REFUSED_AT_MOST, Client, Subject
from openenv_core.errors import ClientError

STEPS: Final = 50
"""Steps after which an episode that is to be compared is broken off."""


def play_here(session: LocalSession, seed: int, actions: Sequence[dict[str, Any]]) -> list[Result]:
    """Play one episode in this process until it is done, or out of actions."""
    results = [session.reset(seed)]
    refused = 0
    for action in actions:
        if results[-1].get("done") or refused >= REFUSED_AT_MOST:
            break
        results.append(session.step(action))
        refused = refused + 1 if "error" in results[-1] else 0
    return results


def play_there(
    subject: Subject, client: Client, seed: int, actions: Sequence[dict[str, Any]], **reset_options: Any
) -> list[Result]:
    """Play the same over the wire."""
    options = {"episode_id": EPISODE_ID, **reset_options}
    with answered(f"an episode with seed {seed}"):
        episode = subject.episode(
            client, seed=seed, actions=iter(actions), max_steps=max(1, len(actions)), **options
        )
    return episode.results


@contextmanager
def answered(doing: str) -> Iterator[None]:
    """Tell of a server that does not answer as of a property that does not hold.

    Args:
        doing: What was asked of it.
    """
    try:
        yield
    except ClientError as error:
        raise CheckFailed(
            f"expected {doing} to be played over the wire, got {type(error).__name__}: {error}",
            change="look at what the server prints: `ropewalk serve` with the same target shows it",
            cause=cause_of(error),
        ) from error


def some_actions(subject: Subject, seed: int) -> list[dict[str, Any]]:
    """Return actions for one compared episode."""
    chosen = subject.actions(seed)
    steps = min(STEPS, subject.limits.steps, subject.promises.validation.episodes.max_steps)
    return [next(chosen) for _ in range(steps)]
