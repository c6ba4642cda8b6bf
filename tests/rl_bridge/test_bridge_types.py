"""Versions are recorded for each token, and the oldest counts."""

from rl_bridge.types import NO_VERSION, Completion, Ending, Group, TrainSample, Trajectory, Turn


def completion(*versions: int) -> Completion:
    return Completion(
        tokens=[1] * len(versions), logprobs=[0.0] * len(versions), versions=versions, stopped=True
    )


def trajectory(*completions: Completion) -> Trajectory:
    turns = [Turn(prompt=[0], completion=one) for one in completions]
    return Trajectory(seed=0, turns=turns, ending=Ending.COMPLETED, reward=0.0)


def test_the_oldest_token_counts() -> None:
    assert completion(5, 4, 6).version == 4
    assert trajectory(completion(5, 6), completion(3, 7)).version == 3
    siblings = [trajectory(completion(5)), trajectory(completion(7), completion(6, 2))]
    assert Group(seed=0, trajectories=siblings).version == 2


def test_turn_without_tokens_does_not_age_the_others() -> None:
    assert completion().version == trajectory(completion()).version == Group(seed=0).version == 0
    assert trajectory(completion(5), completion()).version == 5
    assert Group(seed=0, trajectories=[trajectory(completion()), trajectory(completion(4))]).version == 4


def test_a_row_is_as_old_as_the_oldest_token_that_the_policy_generated() -> None:
    def row(*versions: int) -> TrainSample:
        return TrainSample(
            tokens=[1] * len(versions),
            loss_mask=[version != NO_VERSION for version in versions],
            logprobs=[0.0] * len(versions),
            versions=versions,
            advantage=1.0,
            trajectory=0,
        )

    assert row(NO_VERSION, 4, NO_VERSION, 3, 5).version == 3
    assert row(NO_VERSION).version == 0
