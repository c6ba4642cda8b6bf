"""The replay buffer: bounded, never too stale, and nothing vanishes uncounted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_bridge.buffer.bounded import ReplayBuffer
from rl_bridge.errors import RolloutError
from rl_bridge.types import Completion, Ending, Group, Trajectory, Turn


def group(seed: int, *versions: int) -> Group:
    def completion(version: int) -> Completion:
        return Completion(tokens=[1], logprobs=[0.0], versions=[version], stopped=True)

    turns = [Turn(prompt=[0], completion=completion(version)) for version in versions]
    return Group(
        seed=seed, trajectories=[Trajectory(seed=seed, turns=turns, ending=Ending.COMPLETED, reward=0.0)]
    )


def test_first_in_first_out() -> None:
    buffer = ReplayBuffer(capacity=4, max_staleness=0)
    buffer.put([group(1, 0), group(2, 0), group(3, 0)])
    assert [g.seed for g in buffer.take(2, version=0)] == [1, 2]
    assert len(buffer) == 1
    assert buffer.room == 3
    assert [g.seed for g in buffer.take(5, version=0)] == [3]
    assert buffer.take(1, version=0) == []


def test_a_full_buffer_blocks_its_producer_and_keeps_what_it_has() -> None:
    buffer = ReplayBuffer(capacity=2, max_staleness=0)
    buffer.put([group(1, 0)])
    with pytest.raises(RolloutError, match="at most 1 more groups in the replay buffer, got 2"):
        buffer.put([group(2, 0), group(3, 0)])
    assert len(buffer) == 1
    assert buffer.dropped_stale == 0
    buffer.put([group(4, 0)])
    assert [g.seed for g in buffer.take(9, version=0)] == [1, 4]


def test_a_bound_of_zero_hands_out_the_current_version_and_does_not_starve() -> None:
    buffer = ReplayBuffer(capacity=2, max_staleness=0)
    for version in range(20):
        buffer.put([group(version, version), group(version, version)])
        assert len(buffer.take(2, version=version)) == 2
    assert buffer.dropped_stale == 0


def test_what_is_too_stale_is_dropped_and_counted() -> None:
    buffer = ReplayBuffer(capacity=8, max_staleness=1)
    buffer.put([group(1, 3), group(2, 4), group(3, 5)])
    assert [g.seed for g in buffer.take(3, version=5)] == [2, 3]
    assert buffer.dropped_stale == 1


def test_the_oldest_token_counts() -> None:
    buffer = ReplayBuffer(capacity=8, max_staleness=1)
    buffer.put([group(1, 5, 3, 5)])  # a long trajectory that saw two updates on its way
    assert buffer.take(1, version=5) == []
    assert buffer.dropped_stale == 1


@pytest.mark.parametrize(("capacity", "max_staleness"), [(0, 0), (1, -1)])
def test_bounds_that_make_no_sense_are_refused(capacity: int, max_staleness: int) -> None:
    with pytest.raises(ValueError, match="capacity >= 1 and max_staleness >= 0"):
        ReplayBuffer(capacity=capacity, max_staleness=max_staleness)


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.lists(st.integers(0, 3), max_size=4)),
        st.tuples(st.just("take"), st.integers(0, 4)),
        st.tuples(st.just("train"), st.just(0)),
    ),
    max_size=40,
)


@given(OPERATIONS, st.integers(1, 6), st.integers(0, 3))
def test_in_equals_out_plus_dropped_plus_waiting(
    operations: list[tuple[str, list[int] | int]], capacity: int, max_staleness: int
) -> None:
    buffer = ReplayBuffer(capacity=capacity, max_staleness=max_staleness)
    version = entered = left = 0
    for operation, argument in operations:
        if operation == "train":
            version += 1
        elif isinstance(argument, list):
            groups = [group(0, max(0, version - age)) for age in argument]
            if len(groups) > buffer.room:
                with pytest.raises(RolloutError):
                    buffer.put(groups)
            else:
                buffer.put(groups)
                entered += len(groups)
        else:
            taken = buffer.take(argument, version=version)
            assert len(taken) <= argument
            assert all(version - one.version <= max_staleness for one in taken)
            left += len(taken)
        assert 0 <= len(buffer) <= capacity
        assert entered == left + buffer.dropped_stale + len(buffer)
