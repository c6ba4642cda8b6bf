"""Where the tokens of played groups are kept, and how the controller refers to them.

A rollout worker hands a group's tokens to the trainer's first rank before it returns the outcomes. The controller has
rewards, lengths, versions and the key of each trajectory's tokens; it names a step's trajectories by their keys.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from rl_bridge.errors import TrainerWentBackError
from rl_bridge.tokens.arrays import TokenKey, TrajectoryTokens, load_tokens
from rl_bridge.types import Group, TrainSample, Trajectory


def token_key(trajectory: Trajectory) -> TokenKey:
    """Return the key of a trajectory's tokens; ValueError if nobody keeps them."""
    summary = trajectory.summary
    if summary is None or summary.lease is None:
        raise ValueError("expected a trajectory whose tokens a rollout worker has handed to the trainer")
    return summary.lease, summary.sibling


def token_leases(groups: Iterable[Group]) -> set[int]:
    """Return the leases under which the groups' tokens were handed to the trainer."""
    summaries = (trajectory.summary for group in groups for trajectory in group.trajectories)
    return {summary.lease for summary in summaries if summary is not None and summary.lease is not None}


@dataclass(kw_only=True, slots=True, frozen=True)
class LeasesInUse:
    """The leases whose tokens the controller may still refer to.

    Attributes:
        leases: Those of groups in the buffer, of unfinished groups, and those under which groups are being played.
        next_lease: The lowest id that has not been given out; tokens may arrive under it before this does.
    """

    leases: frozenset[int]
    next_lease: int


@dataclass(kw_only=True, slots=True, frozen=True)
class StoredBatch:
    """The trajectories of a step, whose tokens the trainer has; and the leases of all others that it has to keep.

    Attributes:
        keys: The lease and the sibling under which it has each trajectory's tokens, shape [S, 2].
        advantages: The advantages, shape [S].
        trajectories: The numbers of the trajectories in the step, shape [S].
        groups: The numbers of their groups in the step, shape [S].
        rewards: The rewards that they are trained with, shape [S].
    """

    keys: NDArray[np.int64]
    advantages: NDArray[np.float64]
    trajectories: NDArray[np.int64]
    groups: NDArray[np.int64]
    rewards: NDArray[np.float64]
    in_use: LeasesInUse

    def token_keys(self) -> list[TokenKey]:
        """Return the keys."""
        return [(lease, sibling) for lease, sibling in self.keys.tolist()]


class TokenStore:
    """The tokens of the groups that are not trained yet, in the trainer's first rank, by key.

    They go with the process, and what comes after it goes back to a checkpoint, which has them. Not thread-safe.
    """

    def __init__(self) -> None:
        self._tokens: dict[TokenKey, TrajectoryTokens] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def put(self, tokens: Mapping[TokenKey, TrajectoryTokens]) -> None:
        """Keep the tokens of trajectories that were played under one lease."""
        self._tokens.update(tokens)

    def get(self, keys: Iterable[TokenKey]) -> list[TrajectoryTokens]:
        """Return tokens by their keys; TrainerWentBackError if they are not here."""
        try:
            return [self._tokens[key] for key in keys]
        except KeyError as missing:
            raise TrainerWentBackError(
                f"expected the tokens of lease and sibling {missing.args[0]}, which the trainer no longer has; it has "
                "been restarted since"
            ) from None

    def drop_unused(self, in_use: LeasesInUse) -> None:
        """Drop tokens that are under none of these leases, nor under a later one."""
        self._tokens = {
            key: tokens
            for key, tokens in self._tokens.items()
            if key[0] >= in_use.next_lease or key[0] in in_use.leases
        }

    def take(self, batch: StoredBatch) -> list[TrajectoryTokens]:
        """Return the tokens of a step, and keep them until the next one; drop all that are not in use any more."""
        keys = batch.token_keys()
        stepped = frozenset(lease for lease, _ in keys)
        self.drop_unused(
            LeasesInUse(leases=batch.in_use.leases | stepped, next_lease=batch.in_use.next_lease)
        )
        return self.get(keys)

    def load(self, content: bytes) -> None:
        """Keep the tokens in a checkpoint's file alone."""
        self._tokens = load_tokens(content)


def make_samples(batch: StoredBatch, tokens: Sequence[TrajectoryTokens]) -> list[TrainSample]:
    """Return a step's training samples, given the tokens of its trajectories."""
    columns = (batch.advantages, batch.trajectories, batch.groups, batch.rewards)
    return [
        row
        for part, advantage, index, group, reward in zip(
            tokens, *(column.tolist() for column in columns), strict=True
        )
        for row in part.samples(advantage=advantage, index=index, group=group, reward=reward)
    ]


_GROUPS = TypeAdapter(list[Group])


def dump_groups(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return groups, whose tokens the trainer has, as JSON values."""
    dumped: list[dict[str, Any]] = _GROUPS.dump_python(list(groups), mode="json")
    return dumped


def load_groups(content: Sequence[Mapping[str, Any]]) -> list[Group]:
    """Read the output of `dump_groups`; ValueError if the content is not such output."""
    return _GROUPS.validate_python(list(content))
