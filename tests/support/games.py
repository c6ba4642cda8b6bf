"""Small games of several seats. Each seat's secret is a text that no other seat may see."""

from collections.abc import Mapping
from random import Random
from typing import Any

from pydantic import Field

from openenv_core import Action, MultiAgentEnvironment, Observation, State


class Guess(Action):
    """A guess of the other seats' secret number."""

    number: int


class Secret(Observation):
    """A seat's own secret."""

    secret: str
    round: int = 0


class Secrets(State):
    """What nobody may see."""

    secrets: dict[str, str] = Field(default_factory=dict)


def guess(observation: Secret, rng: Random) -> Guess:
    return Guess(number=rng.randrange(10))


class Rounds(MultiAgentEnvironment[Guess, Secret, Secrets]):
    """Three seats act at once, for three rounds; each is paid the number that it says."""

    seats = ("a", "b", "c")
    BLOCKING = False
    FORKABLE = True

    def reset(self, *, rounds: int = 3) -> dict[str, Secret]:
        self.rounds, self.round = rounds, 0
        self.state.secrets = {seat: f"secret-{seat}-{self.rng.getrandbits(64):x}" for seat in self.seats}
        return self.see(None)

    def step(self, actions: Mapping[str, Guess]) -> dict[str, Secret]:
        if any(action.number > 90 for action in actions.values()):
            raise RuntimeError(f"a bug with {self.state.secrets}")
        self.round += 1
        return self.see(actions)

    def check(self, seat: str, action: Guess) -> None:
        if action.number < 0:
            raise ValueError(f"{seat} said {action.number}")

    def see(self, actions: Mapping[str, Guess] | None) -> dict[str, Secret]:
        secrets, over = self.state.secrets, self.round == self.rounds
        return {
            seat: Secret(
                secret=secrets[seat],
                round=self.round,
                reward=actions[seat].number if actions and seat in actions else None,
                terminated=over,
            )
            for seat in self.seats
        }


class Turns(Rounds):
    """The same, but the seats act one after another, and a policy of the server's plays for those that are gone."""

    POLICIES = {"guess": guess, "seven": lambda *_: Guess(number=7)}  # noqa: RUF012
    ABSENT = "seven"

    @property
    def turn(self) -> tuple[str]:
        return (self.seats[self.round % 3],)


class BlockingRounds(Rounds):
    """The same in threads."""

    BLOCKING = True


class Forfeited(Turns):
    """Who leaves pays the others."""

    ABSENT = "forfeit"

    def forfeit(self, seat: str) -> dict[str, Secret]:
        return {
            each: Secret(secret=self.state.secrets[each], reward=-10 if each == seat else 5, terminated=True)
            for each in self.seats
        }


class Hasty(Turns):
    """Seats whose players are soon gone."""

    TURN_TIMEOUT_S = 3.0


def secret_of(result: Any) -> str:
    """Return the secret in the result of a `GenericEnvClient`."""
    return str(result.observation["secret"])
