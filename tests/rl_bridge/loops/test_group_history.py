"""What became of each group, however many there are, and across a checkpoint."""

import json
from pathlib import Path

from rl_bridge.buffer.ledger import HISTORY, Ledger
from rl_bridge.loops.history import HISTORY_FILE, GroupHistory


def drop(ledger: Ledger, count: int) -> None:
    for _ in range(count):
        lease = ledger.lease(served=0, now=0.0, admit=True)
        assert lease is not None
        ledger.drop(lease.id, "no reward")


def rows(folder: Path) -> list[dict[str, dict[str, str]]]:
    return [json.loads(line) for line in (folder / HISTORY_FILE).read_text().splitlines()]


def test_more_fates_in_one_iteration_than_the_ledger_remembers(tmp_path: Path) -> None:
    ledger = Ledger(max_losses=None)
    history = GroupHistory(tmp_path, ledger)
    drop(ledger, HISTORY + 3)
    history.write(1)
    drop(ledger, 2)
    history.write(2)
    assert [len(row["dropped"]) for row in rows(tmp_path)] == [HISTORY + 3, 2]
    assert set(rows(tmp_path)[1]["dropped"]) == {str(HISTORY + 3), str(HISTORY + 4)}


def test_fates_that_a_checkpoint_holds_are_told_once_by_whoever_goes_on_from_it(tmp_path: Path) -> None:
    ledger = Ledger(max_losses=None)
    history = GroupHistory(tmp_path, ledger)
    drop(ledger, 1)
    history.write(1)
    drop(ledger, 1)  # after the iteration's line, before the checkpoint
    state = json.loads(json.dumps(ledger.state())), json.loads(json.dumps(history.state()))
    drop(ledger, 1)  # after the checkpoint: it is played again
    history.write(2)

    resumed = Ledger(max_losses=None)
    history = GroupHistory(tmp_path, resumed)
    resumed.restore(state[0])
    history.rewind(1, state[1])
    drop(resumed, 1)
    history.write(2)
    assert [list(row["dropped"]) for row in rows(tmp_path)] == [["0"], ["1", "2"]]
