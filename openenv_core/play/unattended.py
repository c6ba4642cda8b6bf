"""A game whose actions are known before, or drawn at random."""

from collections.abc import Iterable

from openenv_core.errors import ConfigurationError
from openenv_core.play.form import Json
from openenv_core.play.game import Game


def play_actions(game: Game, actions: Iterable[Json], options: Json) -> None:
    """Play one episode's actions in their order.

    Raises:
        ConfigurationError: The episode ended before they did.
    """
    game.reset(options)
    for index, action in enumerate(actions, 1):
        if game.over:
            raise ConfigurationError(
                f"expected the episode to last for every --action, got its end before number {index}; "
                "leave the rest out, or choose another --seed"
            )
        game.step(action)


def play_at_random(game: Game, actions: Iterable[Json], options: Json) -> None:
    """Play all of the actions, over as many episodes as that takes; seeds go up from the one given."""
    for action in actions:
        if game.over:
            seed = options.get("seed")
            game.reset({**options, **({} if seed is None else {"seed": seed + game.episodes})})
            if game.over:  # it ended with its reset
                continue
        game.step(action)
