"""Kuhn poker: three cards, two players, one bet."""

from collections.abc import Mapping
from random import Random

from openenv_core import EnvironmentMetadata, MultiAgentEnvironment

from ..models import BET, CARDS, PASS, SEATS, KuhnAction, KuhnObservation, KuhnState, payoff
from ..oracle import equilibrium


def _play_equilibrium(observation: KuhnObservation, rng: Random) -> KuhnAction:
    chance = equilibrium(CARDS.index(observation.card), observation.history)
    return KuhnAction(action="bet" if rng.random() < chance else "pass")


def _play_at_random(observation: KuhnObservation, rng: Random) -> KuhnAction:
    return KuhnAction(action="bet" if rng.random() < 0.5 else "pass")


class KuhnEnvironment(MultiAgentEnvironment[KuhnAction, KuhnObservation, KuhnState]):
    """One game of Kuhn poker. Each player antes one and gets one of three cards: J, Q and K.

    The first player passes or bets one. After a bet the other passes, which folds, or calls. After two passes, or a
    call, the higher card wins. The seed determines the deal.

    A player that leaves, or takes longer than half a minute, folds.
    """

    seats = SEATS
    POLICIES = {"equilibrium": _play_equilibrium, "random": _play_at_random}  # noqa: RUF012 - as the base declares it
    ABSENT = "forfeit"
    BLOCKING = False
    DETERMINISTIC = True
    FORKABLE = True

    def reset(self) -> dict[str, KuhnObservation]:
        """Deal a card to each player."""
        self.state.cards = dict(zip(SEATS, self.rng.sample(range(len(CARDS)), 2), strict=True))
        return {seat: self._observe(seat) for seat in SEATS}

    def step(self, actions: Mapping[str, KuhnAction]) -> dict[str, KuhnObservation]:
        """Pass or bet."""
        (action,) = actions.values()
        self.state.history += BET if action.action == "bet" else PASS
        first, second = self.state.cards.values()
        return self._end(payoff((first, second), self.state.history))

    def forfeit(self, seat: str) -> dict[str, KuhnObservation]:
        """Fold: the player loses what it has put in, which is more than the ante if it has bet."""
        bets = self.state.history[SEATS.index(seat) :: 2].count(BET)
        lost = 1 + bets
        return self._end((-lost, lost) if seat == SEATS[0] else (lost, -lost))

    @property
    def turn(self) -> tuple[str]:
        """The player whose turn it is."""
        return (SEATS[len(self.state.history) % 2],)

    def get_metadata(self) -> EnvironmentMetadata:
        """Return the environment's name and description."""
        return EnvironmentMetadata(name="kuhn", description="Kuhn poker for two players: pass or bet.")

    def _end(self, won: tuple[int, int] | None) -> dict[str, KuhnObservation]:
        if won is None:
            return {seat: self._observe(seat) for seat in SEATS}
        return {seat: self._observe(seat, reward) for seat, reward in zip(SEATS, won, strict=True)}

    def _observe(self, seat: str, reward: int | None = None) -> KuhnObservation:
        card, history = CARDS[self.state.cards[seat]], self.state.history
        moves = ", ".join("pass" if move == PASS else "bet" for move in history) or "none"
        text = f"You are the {seat} player and hold {card}. Moves so far: {moves}."
        shown = None
        if reward is None:
            text += " Pass or bet?" if self.turn[0] == seat else ""
        else:
            if history in ("pp", "pbb", "bb"):
                shown = next(CARDS[held] for other, held in self.state.cards.items() if other != seat)
                text += f" The other player holds {shown}."
            text += f" You {'win' if reward > 0 else 'lose'} {abs(reward)}."
        return KuhnObservation(
            seat=seat,
            card=card,
            history=history,
            opponent_card=shown,
            text=text,
            reward=reward,
            done=reward is not None,
        )
