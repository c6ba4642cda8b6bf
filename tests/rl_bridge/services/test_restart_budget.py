"""How many restarts a replica gets, and how long each waits."""

import pytest

from rl_bridge.services import RestartPolicy
from rl_bridge.services.restarts import RestartBudget


def test_pauses_double_up_to_a_bound_until_the_budget_is_gone() -> None:
    budget = RestartBudget(RestartPolicy(budget=5, window_s=100.0, backoff_s=0.5, max_backoff_s=3.0))
    assert [budget.spend(float(now)) for now in range(6)] == [0.5, 1.0, 2.0, 3.0, 3.0, None]


def test_restarts_older_than_the_window_do_not_count() -> None:
    budget = RestartBudget(RestartPolicy(budget=2, window_s=10.0, backoff_s=1.0))
    assert budget.spend(0.0) == 1.0
    assert budget.spend(6.0) == 2.0
    assert budget.spend(9.9) is None
    assert budget.spend(10.0) == 2.0  # the first is forgotten, the second is not
    assert budget.spend(30.0) == 1.0


def test_no_budget_makes_every_loss_final() -> None:
    assert RestartBudget(RestartPolicy(budget=0)).spend(0.0) is None


def test_many_restarts_wait_no_longer_than_the_bound() -> None:
    budget = RestartBudget(RestartPolicy(budget=5000, window_s=1e9, backoff_s=0.5, max_backoff_s=30.0))
    assert {budget.spend(float(now)) for now in range(4000)} == {0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"budget": -1}, "a budget of at least 0 restarts, got -1"),
        ({"window_s": 0.0}, "a window of more than 0 s, got 0"),
        ({"backoff_s": -0.1}, "0 <= backoff_s <= max_backoff_s"),
        ({"backoff_s": 5.0, "max_backoff_s": 1.0}, "got backoff_s=5 and max_backoff_s=1"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(wrong: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        RestartPolicy(**wrong)  # type: ignore[arg-type]
