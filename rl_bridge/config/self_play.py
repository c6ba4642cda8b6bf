"""`self_play.*`, and who plays the seats of a game (`env.seats`)."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Final, Literal, TypeAlias

from pydantic import Field

from rl_bridge.config.sections import Count, Section

POLICY: Final = "policy"
"""A seat that the policy plays, by default trained in it."""
FROZEN: Final = "frozen"
"""A seat that a version of the policy from the pool plays."""
TRAINED: Final = "trained"
"""In a seating: a seat that the policy plays and is trained in."""
SERVER: Final = "server:"
"""Before the name of a policy of the environment's class, which the server plays."""

Seating: TypeAlias = Mapping[str, str]
"""Who plays each seat of a table: `TRAINED`, `POLICY`, `FROZEN`, `server:NAME`, a function or a checkpoint."""


def is_checkpoint(player: str) -> bool:
    """Whether a player is a checkpoint's folder: nothing else that can play has no colon."""
    return player not in (POLICY, FROZEN, TRAINED) and ":" not in player


def make_seatings(players: Seating, trained: Sequence[str], *, exchange: bool) -> tuple[Seating, ...]:
    """Return the seatings of successive tables: one, or with `exchange` as many as there are seats."""
    seats = list(players)
    names = [TRAINED if seat in trained else players[seat] for seat in seats]
    turns = range(len(seats) if exchange else min(1, len(seats)))
    seatings = [dict(zip(seats, names[turn:] + names[:turn], strict=True)) for turn in turns]
    return tuple(seating for number, seating in enumerate(seatings) if seating not in seatings[:number])


def trained_seats(seating: Seating) -> list[str]:
    """Return the seats of a table that the policy is trained in, each of which is an episode."""
    return [seat for seat, player in seating.items() if player == TRAINED]


def require_siblings(seatings: Sequence[Seating], group_size: int) -> None:
    """Raise ValueError unless a group has two siblings or more of each trained seat, and no seating more often."""
    counts = Counter(seat for seating in seatings for seat in trained_seats(seating))
    rounds, rest = divmod(group_size, counts.total())
    if rest or rounds * min(counts.values()) < 2:
        raise ValueError(
            f"expected rollout.group_size to be a multiple of the number of trained env.seats, {counts.total()}"
            f"{' with exchange_seats' if len(seatings) > 1 else ''}, with at least two siblings of each seat, "
            f"got {group_size}"
        )


class SelfPlayConfig(Section):
    """`self_play.*`: the opponents of the policy where it plays seats of a game (`env.seats`)."""

    pool_interval: Annotated[int, Field(ge=0)] = 0
    """Iterations between the versions of the policy that join the pool of `frozen` seats; they are in `policies/N` of
    the run's folder. 0 adds none to the initial policy."""
    pool_size: Count = 8
    """How many of the newest versions are drawn from, beside the initial policy."""
    draw: Literal["uniform", "win_rate"] = "uniform"
    """How a version is drawn for each iteration. `win_rate` prefers those that the policy seldom wins against, by the
    square of the share of games that it does not win: prioritized fictitious self-play, f_hard of AlphaStar (Vinyals et
    al., Nature 575, 2019). A win is a reward that `evaluation.success` counts as one."""
    opponents: tuple[str, ...] = ()
    """Further opponents in the cross-table: checkpoints, functions, and policies of the server."""
    table_interval: Annotated[int, Field(ge=0)] = 0
    """Iterations between cross-tables; 0 makes one at the end alone."""
    deals: Annotated[int, Field(ge=0)] = 100
    """Held-out deals that the policy plays against each opponent, from every seat; 0 makes no cross-table."""
