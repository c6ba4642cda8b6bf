"""BlackJack, built on Gymnasium's game: one hand per episode, with the table described in words."""

from importlib.util import find_spec
from typing import Any, Protocol

from pydantic import StrictBool

from openenv_core import Environment, EnvironmentMetadata

from ..models import BlackjackAction, BlackjackObservation, BlackjackState, Move, Outcome
from ..table import describe_end, describe_hand, describe_turn

# Imported by the first session, since it would take a fifth of the server's start. A server without it does not start.
if find_spec("gymnasium") is None:
    raise ModuleNotFoundError("No module named 'gymnasium'", name="gymnasium")


class _GymnasiumTable(Protocol):
    """Types for the parts of Gymnasium's untyped class that we use."""

    natural: bool
    sab: bool
    player: list[int]
    dealer: list[int]

    def reset(self, seed: int | None = None) -> tuple[tuple[int, int, int], dict[str, Any]]: ...

    def step(self, action: int) -> tuple[tuple[int, int, int], float, bool, bool, dict[str, Any]]: ...


class BlackjackEnvironment(Environment[BlackjackAction, BlackjackObservation, BlackjackState]):
    """One hand of BlackJack, from an infinite deck, against a dealer who stands on every 17.

    The player hits or stands; there is no doubling, splitting or surrender. The seed fixes the sequence of
    cards, so episodes with the same seed start with the same deal and stay identical as long as their actions are.

    Rules, deal and payouts are those of Gymnasium's class. One instance of it, without wrappers, is reused for
    every hand, because training plays hundreds of thousands of them.
    """

    BLOCKING = False
    DETERMINISTIC = True
    FORKABLE = True

    def __init__(self) -> None:
        from gymnasium.envs.toy_text.blackjack import BlackjackEnv as Table

        self._table: _GymnasiumTable = Table()

    def reset(self, *, natural: StrictBool = False, sab: StrictBool = False) -> BlackjackObservation:
        """Deal a new hand.

        Args:
            natural: whether a natural (an ace and a ten in the first two cards) that beats the dealer pays 1.5.
            sab: Sutton and Barto's rule: a natural beats everything except another natural, and pays 1. Takes
                precedence over `natural`, as in Gymnasium.
        """
        self._table.natural = self.state.natural = natural
        self._table.sab = self.state.sab = sab
        observation, _ = self._table.reset(seed=self.state.seed)
        return self._observe(observation, reward=None, done=False)

    def step(self, action: BlackjackAction) -> BlackjackObservation:
        """Take a card, or stand and let the dealer play."""
        observation, reward, done, _, _ = self._table.step(1 if action.action == "hit" else 0)
        self.state.done = done
        return self._observe(observation, reward=reward, done=done)

    def get_metadata(self) -> EnvironmentMetadata:
        """Return the environment's name and description."""
        return EnvironmentMetadata(
            name="blackjack",
            description="A hand of BlackJack: hit or stand against a dealer who stands on every 17.",
        )

    def _observe(
        self, observation: tuple[int, int, int], reward: float | None, done: bool
    ) -> BlackjackObservation:
        total, dealer_card, usable_ace = observation
        player = list(self._table.player)
        dealer = list(self._table.dealer) if done else [dealer_card]
        hand = describe_hand(player, total, bool(usable_ace))
        legal: list[Move] = [] if done else ["hit", "stand"]
        outcome: Outcome | None = None
        dealer_total: int | None = None
        if reward is None or not done:
            text = describe_turn(hand, dealer_card)
        else:
            outcome = "win" if reward > 0 else "loss" if reward < 0 else "push"
            low = sum(dealer)
            soft = 1 in dealer and low <= 11
            dealer_total = low + 10 if soft else low
            text = describe_end(hand, describe_hand(dealer, dealer_total, soft), total > 21, outcome, reward)
        return BlackjackObservation(
            done=done,
            reward=reward,
            player_total=total,
            dealer_card=dealer_card,
            usable_ace=bool(usable_ace),
            legal_actions=legal,
            player_cards=player,
            dealer_cards=dealer,
            dealer_total=dealer_total,
            player_natural=len(player) == 2 and total == 21,
            outcome=outcome,
            text=text,
        )
