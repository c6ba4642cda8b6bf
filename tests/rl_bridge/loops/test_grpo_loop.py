"""The loop with roles in this process: order of calls, deadlines, and errors that end a run."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from loop_stage import Stage, hang, raising

from rl_bridge.errors import BridgeError, RoleError, RolloutError
from rl_bridge.loops.recovery import train_with_recovery
from rl_bridge.loops.run import Run
from rl_bridge.loops.weight_sync import sync_metrics


async def test_every_iteration_collects_trains_synchronises_logs_and_saves(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    logged_at_save: list[int] = []
    stage.on("save_checkpoint", lambda: logged_at_save.append(len(stage.rows())))
    await stage.train()
    iteration = ["train_step", "push_weights", "update_weights", "save_checkpoint"]
    assert stage.roles.calls == [*iteration, *iteration, "export"]
    # A checkpoint never knows of an iteration that was not logged: resumed, the log would have a gap.
    assert logged_at_save == [1, 2]
    assert stage.roles.waited == [False, True], "the loop goes on beside each but the last"
    assert [row["iteration"] for row in stage.rows()] == [1, 2]
    assert [row["rollout/staleness/0"] for row in stage.rows()] == [1.0, 1.0]
    assert 0.0 < stage.rows()[0]["time/elapsed_s"] < stage.rows()[1]["time/elapsed_s"]
    assert "probe/score" in stage.rows()[1]
    sync = {name: value for name, value in stage.rows()[0].items() if name.startswith("sync/")}
    assert sync == {"sync/push_s": 0.25, "sync/transport_s": 0.5, "sync/pause_s": 0.75, "sync/load_s": 0.125}
    assert stage.rows("groups.jsonl") == [
        {"iteration": 1, "trained": [0, 1, 2, 3], "dropped": {}},
        {"iteration": 2, "trained": [4, 5, 6, 7], "dropped": {}},
    ]


async def test_share_of_stragglers_cut_is_logged(tmp_path: Path) -> None:
    stage = Stage(tmp_path)

    async def train(run: Run) -> None:
        run.buffer.take_stragglers_cut = iter([1, 0]).__next__  # type: ignore[method-assign]
        await train_with_recovery(run)

    await stage.train(train)
    assert [row["rollout/stragglers_cut"] for row in stage.rows()] == [0.25, 0.0]  # of four groups


async def test_colocated_generators_sleep_while_the_trainer_works(tmp_path: Path) -> None:
    stage = Stage(tmp_path, colocate=True)
    await stage.train()
    step = ["sleep", "train_step", "push_weights", "release_gpu", "update_weights"]
    checkpoint, export = (
        ["sleep", name, "release_gpu", "update_weights"] for name in ("save_checkpoint", "export")
    )
    assert stage.roles.calls == [*step, *checkpoint, *step, *checkpoint, *export]


@pytest.mark.parametrize(
    ("name", "told", "max_staleness"),
    [
        ("train_step", "a step of the optimizer", 1),
        ("update_weights", "new weights to be served", 1),
        ("save_checkpoint", "a checkpoint", 0),
    ],
)
async def test_role_that_hangs_ends_the_run_by_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, told: str, max_staleness: int
) -> None:
    loop, passed_s = asyncio.get_running_loop(), 0.0
    clock = loop.time
    monkeypatch.setattr(loop, "time", lambda: clock() + passed_s)

    async def hang_until_the_deadline() -> None:
        nonlocal passed_s
        passed_s += 3.5
        await hang()

    stage = Stage(tmp_path, max_staleness=max_staleness, iterations=4, timeout_s=3.0)
    stage.on(name, hang_until_the_deadline)
    with pytest.raises(RoleError, match=rf"expected {told} within 3 s.*trainer\.timeout_s"):
        await stage.train()


async def test_timeout_error_of_a_role_is_not_taken_for_the_deadline(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.on("update_weights", raising(TimeoutError("another clock")))
    with pytest.raises(TimeoutError, match="another clock"):
        await stage.train()


async def test_environment_that_always_fails_ends_the_run_with_the_reason(tmp_path: Path) -> None:
    stage = Stage(tmp_path, lost=lambda number: True)
    with pytest.raises(RolloutError, match=r"none of the last 8 groups could be trained.*on fire"):
        await stage.train()
    assert stage.roles.calls == []


async def test_lost_groups_are_replaced_by_others(tmp_path: Path) -> None:
    stage = Stage(tmp_path, lost=lambda number: number in (1, 3))
    await stage.train()
    assert [row["rollout/trajectories"] for row in stage.rows()] == [8, 8]
    first, second = stage.rows("groups.jsonl")
    assert set(first["dropped"]) == {"0", "2"}
    assert set(first["dropped"].values()) == {"too few siblings: 2 dropped"}
    assert first["trained"] + second["trained"] == [1, 3, 4, 5, 6, 7, 8, 9]


async def test_failed_weight_update_ends_the_run_while_it_waits_for_rollouts(tmp_path: Path) -> None:
    stage = Stage(tmp_path, max_staleness=1, iterations=20)
    stage.on("update_weights", raising(RoleError("no memory")))
    with pytest.raises(RoleError, match="no memory"):
        await stage.train()
    assert stage.run.version < 4


def test_slowest_generator_is_what_new_weights_cost() -> None:
    first: Any = SimpleNamespace(transport_s=1.0, pause_s=5.0, load_s=2.0)
    second: Any = SimpleNamespace(transport_s=3.0, pause_s=4.0, load_s=1.0)
    slowest = {"sync/push_s": 9.0, "sync/transport_s": 3.0, "sync/pause_s": 5.0, "sync/load_s": 2.0}
    assert sync_metrics(9.0, [first, second]) == slowest


async def test_disk_without_room_for_the_figures_ends_the_run_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "groups.jsonl").symlink_to("/dev/full")
    with pytest.raises(BridgeError, match=r"No space left on device; .*--resume"):
        await Stage(tmp_path).train()


async def test_held_out_episodes_are_on_the_learning_curve_also_of_the_last_iteration(tmp_path: Path) -> None:
    """Siblings of the stage earn 0 and 1 in turn, so every task is solved in half of its four repetitions."""
    keys = {"curve_interval": 2, "curve_tasks": 3, "repetitions": 4, "success": 0.5}
    stage = Stage(tmp_path, iterations=3, evaluation=keys)
    await stage.train()
    curve = [
        {name: value for name, value in row.items() if name.startswith("held_out/")} for row in stage.rows()
    ]
    assert curve[0] == {}
    for row in curve[1:]:
        assert row["held_out/mean@4"] == row["held_out/pass@1"] == 0.5
        assert row["held_out/pass@2"] == pytest.approx(
            1 - 1 / 6
        )  # but for two failures, of the six pairs of attempts
        assert row["held_out/pass@4"] == 1.0
        assert row["held_out/pass@1_low"] < 0.5 < row["held_out/pass@1_high"]
        assert row["held_out/lost"] == 0.0


async def test_policy_is_exported_as_often_as_was_asked_for(tmp_path: Path) -> None:
    stage = Stage(tmp_path, iterations=5, export_interval=2)
    await stage.train()
    assert [Path(folder).relative_to(tmp_path) for folder in stage.roles.exported] == [
        Path("policies/2"),
        Path("policies/4"),
        Path("policy"),
    ]
    assert (tmp_path / "policies" / "4" / "config.json").exists()
