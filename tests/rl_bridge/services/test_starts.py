"""Each process draws numbers of its own, and each start of it others."""

import pytest

from rl_bridge.services.starts import FIRST, VARIABLE, own_seed, start_of


def test_no_two_starts_draw_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = set()
    for place in [
        (replica, rank, before) for replica in range(20) for rank in range(4) for before in range(3)
    ]:
        monkeypatch.setenv(VARIABLE, start_of(*place))
        seed = own_seed(7)
        assert own_seed(7) == seed != own_seed(8)
        assert 0 <= seed < 1 << 31
        drawn.add(seed)
    assert len(drawn) == 20 * 4 * 3


def test_the_first_of_all_keeps_the_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert own_seed(7) == 7
    assert start_of(0, 0, 0) == FIRST
    monkeypatch.setenv(VARIABLE, FIRST)
    assert own_seed(7) == 7
