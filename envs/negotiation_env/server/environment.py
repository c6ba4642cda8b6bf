"""Two players talk, and divide items that each values differently."""

from collections.abc import Mapping
from random import Random

from openenv_core import EnvironmentMetadata, MultiAgentEnvironment

from ..division import TOTAL_VALUE, draw_pool, rest_of, shares, worth
from ..models import ITEMS, SEATS, Item, NegotiationAction, NegotiationObservation, NegotiationState

MAX_TURNS = 8


def _concede(observation: NegotiationObservation, rng: Random) -> NegotiationAction:
    """Ask for less and less, and accept what is worth as much as the next offer would be."""
    taken = MAX_TURNS - observation.turns_left
    goal = max(1, TOTAL_VALUE - 2 - taken)
    if observation.offer is not None and worth(observation.offer, observation.values) >= goal:
        return NegotiationAction(message="I accept.", accept=True)
    # Of the shares that are worth enough to it, the one that takes fewest items.
    enough = [share for share in shares(observation.items) if worth(share, observation.values) >= goal]
    share = min(enough, key=lambda share: (sum(share.values()), -worth(share, observation.values)))
    return NegotiationAction(message=f"I would like {_in_words(share)}.", take=share)


def _play_at_random(observation: NegotiationObservation, rng: Random) -> NegotiationAction:
    if observation.offer is not None and rng.random() < 0.3:
        return NegotiationAction(message="Agreed.", accept=True)
    share = {item: rng.randint(0, count) for item, count in observation.items.items()}
    return NegotiationAction(message=f"I take {_in_words(share)}.", take=share)


class NegotiationEnvironment(
    MultiAgentEnvironment[NegotiationAction, NegotiationObservation, NegotiationState]
):
    """Two players talk and divide books, hats and balls, which are worth different amounts to each.

    They take turns, at most eight in all. A turn is a message, with an offer or the acceptance of the other's offer. A
    player's reward is what it gets by an agreement, from 0 to 1 (everything); without an agreement both get 0. A
    player sees its own values only. The seed determines items and values.

    If a player leaves, or takes longer than half a minute, there is no agreement.
    """

    seats = SEATS
    POLICIES = {"concede": _concede, "random": _play_at_random}  # noqa: RUF012 - as the base declares it
    ABSENT = "forfeit"
    BLOCKING = False
    DETERMINISTIC = True
    FORKABLE = True

    def reset(self) -> dict[str, NegotiationObservation]:
        """Draw the items, and what each is worth to each player."""
        self.state.items, self.state.values = draw_pool(self.rng)
        return self._observe_all(None)

    def check(self, seat: str, action: NegotiationAction) -> None:
        """Refuse an offer of more than there is, and the acceptance of no offer."""
        if action.accept and self.state.offer is None:
            raise ValueError("there is no offer to accept; make one with `take`")
        if action.accept and action.take is not None:
            raise ValueError("a turn accepts an offer or makes one, not both")
        for item, count in (action.take or {}).items():
            if count > self.state.items[item]:
                raise ValueError(f"there are {self.state.items[item]} {item}, not {count}")

    def step(self, actions: Mapping[str, NegotiationAction]) -> dict[str, NegotiationObservation]:
        """Say something, and offer or accept."""
        ((seat, action),) = actions.items()
        state = self.state
        state.turns += 1
        if action.accept:
            assert state.offer is not None
            other = SEATS[1 - SEATS.index(seat)]
            state.got = {seat: state.offer, other: rest_of(state.items, state.offer)}
        elif action.take is not None:
            state.offer = rest_of(state.items, action.take)
        else:
            state.offer = None
        state.talk.append((seat, action.message))
        if state.got is None and state.turns < MAX_TURNS:
            return self._observe_all(None)
        return self._observe_all(
            {
                each: 0.0 if state.got is None else worth(state.got[each], state.values[each]) / TOTAL_VALUE
                for each in SEATS
            }
        )

    def forfeit(self, seat: str) -> dict[str, NegotiationObservation]:
        """End without an agreement."""
        return self._observe_all(dict.fromkeys(SEATS, 0.0))

    @property
    def turn(self) -> tuple[str]:
        """The player whose turn it is."""
        return (SEATS[self.state.turns % 2],)

    def get_metadata(self) -> EnvironmentMetadata:
        """Return the environment's name and description."""
        return EnvironmentMetadata(name="negotiation", description="Two players talk and divide items.")

    def _observe_all(self, rewards: Mapping[str, float] | None) -> dict[str, NegotiationObservation]:
        return {seat: self._observe(seat, None if rewards is None else rewards[seat]) for seat in SEATS}

    def _observe(self, seat: str, reward: float | None) -> NegotiationObservation:
        state = self.state
        offer = state.offer if seat == self.turn[0] and reward is None else None
        got = None if state.got is None else state.got[seat]
        observation = NegotiationObservation(
            seat=seat,
            items=state.items,
            values=state.values[seat],
            talk=list(state.talk),
            offer=offer,
            turns_left=MAX_TURNS - state.turns,
            got=got,
            text="",
            reward=reward,
            terminated=reward is not None,
        )
        observation.text = _describe(observation)
        return observation


def _describe(observation: NegotiationObservation) -> str:
    lines = [f"There are {_in_words(observation.items)}."]
    worths = ", ".join(f"one of the {item} {observation.values[item]}" for item in ITEMS)
    lines.append(f"To you are worth: {worths}.")
    lines += [
        f"{'You' if speaker == observation.seat else 'The other'}: {message}"
        for speaker, message in observation.talk
    ]
    if observation.offer is not None:
        lines.append(f"You are offered {_in_words(observation.offer)}.")
    if observation.reward is not None:
        ending = (
            "There is no agreement" if observation.got is None else f"You get {_in_words(observation.got)}"
        )
        lines.append(f"{ending}: {observation.reward:g}.")
    else:
        lines.append(f"Turns left: {observation.turns_left}.")
    return "\n".join(lines)


def _in_words(share: Mapping[Item, int]) -> str:
    return ", ".join(f"{count} {item}" for item, count in share.items() if count) or "nothing"
