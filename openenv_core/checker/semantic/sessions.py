"""Whether sessions that are played at once stay out of each other's episodes."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final

from openenv_core.checker.check import CheckFailed, Level, NotApplicable, check
from openenv_core.checker.playing.compared import answered, some_actions
from openenv_core.checker.playing.parting import Result, parting
from openenv_core.checker.semantic.seeds import repeats
from openenv_core.checker.subject import Client, Subject, plain
from openenv_core.errors import CapacityReached, ExecutionFailed, ValidationFailed

CHANGE: Final = (
    "keep an episode in attributes that __init__ or reset sets on self, never on the class or in the module; "
    "where instances cannot share a process, leave SUPPORTS_CONCURRENT_SESSIONS at False"
)

STEPS: Final = 20


@dataclass(slots=True)
class Trace:
    """What one session saw of its episode.

    Attributes:
        results: As `play_there` returns them.
        states: The episode's id and the number of steps that the state told after each.
    """

    results: list[Result] = field(default_factory=list)
    states: list[tuple[Any, Any]] = field(default_factory=list)

    def parting(self, other: "Trace", results: bool) -> str | None:
        """Return where two traces part.

        Args:
            other: The one to compare with.
            results: Whether what the environment answered is to be the same, or only what its state tells.
        """
        if results and (found := parting(self.results, other.results)) is not None:
            return found
        for step, (one, two) in enumerate(zip(self.states, other.states, strict=False)):
            if one != two:
                return f"after {step} steps, the state's episode_id and step_count are {one} and {two}"
        return None


class Player:
    """One session that plays one episode, a step at a time.

    Args:
        subject: The environment.
        client: The session.
        number: Which of several it is: its seed and its episode's name come from it.
    """

    def __init__(self, subject: Subject, client: Client, number: int) -> None:
        self._subject = subject
        self._client = client
        self._seed = subject.limits.seed + number
        self._actions = some_actions(subject, number)[:STEPS]
        self._name = f"ropewalk-session-{number}"
        self.trace = Trace()

    def begin(self) -> None:
        """Reset."""
        result = self._subject.reset(self._client, seed=self._seed, episode_id=self._name)
        self._keep(plain(result))

    def step(self) -> bool:
        """Play one step; return whether the episode goes on."""
        taken = len(self.trace.results) - 1
        if taken >= len(self._actions) or self.trace.results[-1].get("done"):
            return False
        try:
            self._keep(plain(self._client.step(self._actions[taken])))
        except (ValidationFailed, ExecutionFailed) as error:
            self._keep({"error": error.code})
        return True

    def whole(self) -> Trace:
        """Play it all."""
        self.begin()
        while self.step():
            pass
        return self.trace

    def _keep(self, result: Result) -> None:
        self.trace.results.append(result)
        state = self._client.state()
        self.trace.states.append((state.get("episode_id"), state.get("step_count")))


@check(Level.SEMANTIC)
def check_sessions_are_separate(subject: Subject) -> None:
    """Two sessions whose steps alternate see what each would see alone."""
    if (found := touching(subject)) is not None:
        raise CheckFailed(f"expected two sessions not to touch each other, got: {found}", change=CHANGE)


def touching(subject: Subject) -> str | None:
    """Return what one of two sessions saw of the other; None where they are separate.

    Raises:
        NotApplicable: There can be only one.
    """
    if subject.cap == 1:
        raise NotApplicable("the server takes one session at a time")
    found: str | None = subject.once("touching", lambda: _touching(subject))
    return found


def _touching(subject: Subject) -> str | None:
    numbers = (0, 1)
    alone = [solo(subject, number) for number in numbers]
    with ExitStack() as stack, answered("two episodes at once"):
        players = [Player(subject, stack.enter_context(subject.client()), number) for number in numbers]
        try:
            for player in players:
                player.begin()
        except CapacityReached:
            raise NotApplicable("the server takes one session at a time") from None
        while sum(player.step() for player in players):  # all of them, each time
            pass
    return compared(alone, [player.trace for player in players], repeats(subject))


def solo(subject: Subject, number: int, url: str | None = None) -> Trace:
    """Play a session's episode while there is no other."""
    with subject.client(url) as client, answered("an episode"):
        return Player(subject, client, number).whole()


def compared(alone: Sequence[Trace], together: Sequence[Trace], results: bool) -> str | None:
    """Return how what sessions saw together differs from what each saw alone.

    Args:
        alone: One a session.
        together: Likewise.
        results: Whether episodes repeat, so that all of them can be compared.
    """
    for number, (one, other) in enumerate(zip(alone, together, strict=True)):
        if (found := one.parting(other, results)) is not None:
            return f"in session {number}, {found} (alone, and beside {len(alone) - 1} others)"
    return None
