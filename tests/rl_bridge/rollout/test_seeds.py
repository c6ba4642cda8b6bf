"""Seeds: functions of what they are for, never two alike where things should differ."""

from hypothesis import given
from hypothesis import strategies as st

from rl_bridge.rollout.seeds import TRAINING_SEEDS, group_seed, held_out_seeds, sampling_seed

RUN, NUMBER = st.integers(0, 2**31 - 1), st.integers(0, 2**40)


@given(RUN, NUMBER, NUMBER, st.integers(1, 64))
def test_held_out_seeds_are_never_trained_on(run: int, group: int, first: int, count: int) -> None:
    held_out = held_out_seeds(first, count)
    assert len(held_out) == count
    assert 0 <= group_seed(run, group) < TRAINING_SEEDS <= min(held_out)


def test_held_out_seeds_go_on_where_the_last_part_ended() -> None:
    assert [*held_out_seeds(0, 5), *held_out_seeds(5, 3)] == [*held_out_seeds(0, 8)]


def test_other_groups_and_other_runs_have_other_deals() -> None:
    deals = [group_seed(run, group) for run in range(10) for group in range(100)]
    assert len(set(deals)) == len(deals)
    # A pair, not a sum: the next run does not repeat this one's next group.
    assert group_seed(0, 1) != group_seed(1, 0)
    assert group_seed(3, 5) == group_seed(3, 5)


@given(RUN, NUMBER, st.integers(0, 1000), st.integers(0, 1000))
def test_a_completions_seed_is_one_that_engines_take(run: int, group: int, sibling: int, turn: int) -> None:
    assert 0 <= sampling_seed(run, group, sibling, turn) < 2**32


def test_no_two_completions_of_a_run_are_sampled_with_one_seed() -> None:
    seeds = [
        sampling_seed(run, group, sibling, turn)
        for run in range(2)
        for group in range(8)
        for sibling in range(8)
        for turn in range(8)
    ]
    assert len(set(seeds)) == len(seeds)
