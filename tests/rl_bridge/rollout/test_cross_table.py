"""The cross-table: its rows, and who is loaded when."""

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from serving import serving
from worker_fixtures import Play, playing

from envs.kuhn_env import KuhnAction, KuhnObservation
from envs.kuhn_env.server.app import app as kuhn_app
from examples.grpo_kuhn.task import KuhnTask
from rl_bridge.buffer.ledger import Ledger
from rl_bridge.buffer.replay import Admission, ReplayBuffer
from rl_bridge.config import Config
from rl_bridge.config.self_play import TRAINED
from rl_bridge.errors import ConfigError
from rl_bridge.loops.cross_table import POLICIES_FOLDER, TABLE_FILE, Opponents, make_row, opponent_config
from rl_bridge.loops.grpo import collect
from rl_bridge.rollout.assignment import Assignment, AssignmentResult, held_out_seeds
from rl_bridge.rollout.dispatcher import Dispatcher
from rl_bridge.services.handle import LocalService
from rl_bridge.types import Ending, Trajectory

SEATS = ("first", "second")


def game(reward: float, *, others: float | None = None, ending: Ending = Ending.COMPLETED) -> Trajectory:
    return Trajectory(seed=1, ending=ending, reward=reward, others=others)


def test_a_row_pairs_the_seats_of_a_deal() -> None:
    games = {
        0: game(1.0, others=-1.0),
        1: game(0.0, others=0.5),
        2: game(3.0, others=0.0),
        3: game(-3.0, ending=Ending.ILLEGAL),
        4: game(2.0, others=1.0),  # the same deal's other game has no result
    }
    row = make_row("0", SEATS, 3, games)
    assert row["seats"]["first"] | {"ci95": None} == {"mean": 2.0, "ci95": None, "games": 3}
    assert row["seats"]["second"] | {"ci95": None} == {"mean": -1.5, "ci95": None, "games": 2}
    assert (row["mean"], row["joint"]["mean"], row["illegal"], row["lost"]) == (0.25, 1.625, 1, 1)
    # Of the deals' means, 0.5 and 0: Student's t for one degree of freedom is 12.706.
    assert row["ci95"] == pytest.approx((0.25 - 12.706 * 0.25, 0.25 + 12.706 * 0.25))
    assert make_row("0", SEATS, 1, {})["mean"] is None


class Generator:
    endpoints = frozenset({"load_checkpoint"})

    def __init__(self) -> None:
        self.loaded: list[str] = []

    async def load_checkpoint(self, path: str, version: int) -> None:
        self.loaded.append(Path(path).name)


class Games:
    """A dispatcher that plays nothing: the policy wins its seat's number."""

    opponent: int | None = None

    def __init__(self) -> None:
        self.seatings: list[Any] = []

    async def play_held_out(
        self, seeds: Sequence[int], on_outcome: Callable[[int, Any], None], *, seatings: Any, **_: Any
    ) -> None:
        assert list(seeds) == [seed for seed in held_out_seeds(0, 3) for _ in SEATS]
        self.seatings.append(seatings)
        for number in range(len(seeds)):
            on_outcome(number, game(float(number % 2), others=0.0))


def make_opponents(folder: Path, **keys: Any) -> tuple[Opponents, Generator, Games]:
    env = {"app": "a:b", "seats": {"first": "policy", "second": "frozen"}, **keys.pop("env", {})}
    self_play = {"pool_interval": 2, "deals": 3, **keys}
    rollout, trainer = {"task": "a:b"}, {"iterations": 9}
    for version in (2, 4, 6, 8):
        (folder / POLICIES_FOLDER / str(version)).mkdir(parents=True, exist_ok=True)
    config = Config.model_validate(
        {"env": env, "rollout": rollout, "trainer": trainer, "self_play": self_play}
    )
    generator, games = Generator(), Games()
    opponents = Opponents(
        config,
        folder,
        folder / "start",
        generator=LocalService(generator),
        dispatcher=games,  # type: ignore[arg-type]
        tasks={"": SimpleNamespace()},
        chat=None,  # type: ignore[arg-type]
        console=Console(file=io.StringIO()),
    )
    return opponents, generator, games


async def test_versions_are_loaded_as_they_are_drawn_and_a_resumed_run_has_the_same(tmp_path: Path) -> None:
    opponents, generator, games = make_opponents(tmp_path, table_interval=5)
    drawn = []
    for version in range(1, 9):
        await opponents.begin_round(version)
        drawn.append(games.opponent)
    assert len(set(drawn)) > 1
    assert all(each in opponents.pool.versions(version) for version, each in enumerate(drawn, 1))
    assert generator.loaded[-1] == str(drawn[-1]).replace("0", "start")
    state = json.loads(json.dumps(opponents.state()))
    resumed, generator, games = make_opponents(tmp_path)
    await resumed.rewind(8, state)
    assert (games.opponent, generator.loaded) == (drawn[-1], [str(drawn[-1]).replace("0", "start")])
    # The table of iteration 5, against 0, 2 and 4, is kept; one of a later iteration is made again.
    (table,) = map(json.loads, (tmp_path / TABLE_FILE).read_text().splitlines())
    assert (table["iteration"], [row["opponent"] for row in table["opponents"]]) == (5, ["0", "2", "4"])
    await resumed.rewind(4, None)
    assert (tmp_path / TABLE_FILE).read_text() == ""
    assert games.opponent == 0


def test_a_run_that_is_resumed_with_another_interval_draws_what_there_is(tmp_path: Path) -> None:
    opponents, _, _ = make_opponents(tmp_path, pool_interval=3)
    assert opponents.pool.versions(10) == [0, 6]


async def test_the_last_cross_table_is_against_all_opponents_from_every_seat(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    named = [str(tmp_path / "other"), "server:equilibrium"]
    opponents, generator, games = make_opponents(tmp_path, pool_size=1, opponents=named)
    await opponents.begin_round(9)
    assert generator.loaded[:2] == ["8", "other"]  # version 0 is there from the start
    players = ["0", "8", *named]
    assert games.seatings == [
        ({"first": TRAINED, "second": player}, {"first": player, "second": TRAINED}) for player in players
    ]
    metrics = opponents.take_metrics()
    assert metrics["cross/8/mean"] == 0.5
    assert (metrics["cross/server:equilibrium/seat/first"], metrics["cross/0/seat/second"]) == (0.0, 1.0)
    assert opponents.take_metrics() == {}
    missing, _, _ = make_opponents(tmp_path, opponents=["nowhere"])
    with pytest.raises(ConfigError, match="the folder of a checkpoint"):
        await missing.begin_round(9)


def test_the_generator_of_opponents_draws_other_numbers_than_the_policys(tmp_path: Path) -> None:
    """The first replicas of both keep the seed of their configuration (`derive_seed`)."""
    config = make_opponents(tmp_path)[0]._config.model_copy(update={"seed": 2**31 - 1})
    other = opponent_config(config)
    assert other.seed != config.seed
    assert type(config).model_validate(other.model_dump(exclude_unset=True)).seed == other.seed


def fold(observation: KuhnObservation) -> KuhnAction:
    return KuhnAction(action="pass")


class Workers:
    """One rollout worker as the dispatcher's service."""

    endpoints = frozenset({"play", "cancel", "playing"})

    def __init__(self, play: Play) -> None:
        self._worker = play.worker

    async def play(self, assignment: Assignment) -> AssignmentResult:
        return await self._worker.play(assignment)

    async def cancel(self, leases: Sequence[int]) -> None:
        self._worker.cancel(leases)

    async def playing(self) -> dict[int, float]:
        return self._worker.playing()


async def test_deals_of_a_real_game_are_played_from_every_seat(tmp_path: Path) -> None:
    """Whoever always bets wins the ante of one who always passes, and a function that folds to it loses one."""
    function = f"{__name__}:fold"
    opponents, _, _ = make_opponents(
        tmp_path, deals=10, opponents=[function, "server:equilibrium"], pool_interval=0
    )
    buffer = ReplayBuffer(
        Ledger(max_losses=None), Admission(groups_per_batch=1, max_staleness=0, iterations=0), timeout_s=60.0
    )
    async with (
        serving(kuhn_app) as address,
        playing([f"http://{address}"], KuhnTask, lambda _: "bet", opponent=lambda _: "pass") as play,
    ):
        config = opponents._config
        opponents._dispatcher = Dispatcher(LocalService(Workers(play)), buffer, config, collect=collect)
        await opponents.begin_round(config.trainer.iterations)
    (table,) = map(json.loads, (tmp_path / TABLE_FILE).read_text().splitlines())
    frozen, folding, equilibrium = table["opponents"]
    for row in (frozen, folding):
        assert [row["seats"][seat] for seat in SEATS] == [{"mean": 1.0, "ci95": None, "games": 10}] * 2
        assert (row["mean"], row["joint"]["mean"], row["illegal"], row["lost"]) == (1.0, 0.0, 0, 0)
    assert equilibrium["lost"] == 0
    assert (equilibrium["seats"]["first"]["games"], equilibrium["joint"]["mean"]) == (10, None)
