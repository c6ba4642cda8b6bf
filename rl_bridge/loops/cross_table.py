"""The policy's opponents during a run: which one plays when, and the cross-table of the policy against each of them."""

import itertools
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from openenv_core.evaluation.statistics import mean_interval
from rl_bridge.config import Config
from rl_bridge.config.self_play import FROZEN, TRAINED, Seating, is_checkpoint
from rl_bridge.errors import ConfigError
from rl_bridge.metrics.sinks import environment_prefix, rewind
from rl_bridge.rollout.assignment import Outcome, held_out_seeds
from rl_bridge.rollout.dispatcher import Dispatcher
from rl_bridge.rollout.episode import ILL_FORMED
from rl_bridge.rollout.opponents import OpponentPool
from rl_bridge.rollout.policy import ChatPolicy
from rl_bridge.rollout.task import Task, to_floats
from rl_bridge.services.handle import EndpointOwner
from rl_bridge.types import Ending, PolicyVersion, Trajectory

TABLE_FILE: Final = "cross_table.jsonl"
"""A JSON line for each cross-table of an environment."""
POLICIES_FOLDER: Final = "policies"
"""Folder, in a run's folder, of the policy's versions: the pool's, and one for each `trainer.export_interval`."""
SEED_LIMIT: Final = 2**31
"""That of `Config.seed`."""
EXPLOITABILITY: Final = "exploitability"
"""The figure of a task's probe that a cross-table shows: the exact one of the environment's oracle."""


class Opponents:
    """The policy's opponents in a run.

    Args:
        model_path: The checkpoint that the run began with, which is version 0.
        generator: The service of the opponents' `PolicyActor`; None if nobody plays with weights of its own.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        model_path: Path,
        *,
        generator: EndpointOwner | None,
        dispatcher: Dispatcher,
        tasks: Mapping[str, Any],
        chat: ChatPolicy,
        console: Console,
    ) -> None:
        self.pool = OpponentPool(
            config.self_play,
            config.seed,
            config.evaluation.success,
            is_saved=lambda version: player_folder(str(version), folder, model_path).is_dir(),
        )
        self._config, self._folder, self._model_path = config, folder, model_path
        self._generator, self._dispatcher = generator, dispatcher
        self._tasks, self._chat, self._console = tasks, chat, console
        self._source = initial_player(config)
        self._loaded: str | None = self._source
        self._dispatcher.opponent = 0 if config.opponent_source == FROZEN else None
        self._loads = itertools.count(1)
        self._metrics: dict[str, float] = {}

    async def begin_round(self, version: PolicyVersion) -> None:
        """Make the cross-table of a version that generators have just got, if due, and draw its opponent.

        With a `table_interval` the version that the run begins with has one too.
        """
        interval, last = self._config.self_play.table_interval, self._config.trainer.iterations
        if version == last or (interval and version % interval == 0):
            for name, env in self._config.environments.items():
                if env.seats and self._config.self_play.deals:
                    await self._make_table(name, list(env.players), version)
        if self._config.opponent_source == FROZEN:
            self._dispatcher.opponent = self.pool.draw(version)
        await self._load(self._drawn)

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics of the cross-tables since the last call, by their names in the log."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as a JSON object."""
        return {"opponent": self._dispatcher.opponent, "results": self.pool.state()}

    async def rewind(self, version: PolicyVersion, state: Mapping[str, Any] | None) -> None:
        """Go back to a checkpoint, or with None to the beginning of the run."""
        rewind(self._folder / TABLE_FILE, version)
        self.pool.restore({} if state is None else state["results"])
        if self._config.opponent_source == FROZEN:
            self._dispatcher.opponent = 0 if state is None else state["opponent"]
        self._loaded = None
        await self._load(self._drawn)

    @property
    def _drawn(self) -> str:
        version = self._dispatcher.opponent
        return self._source if version is None else str(version)

    async def _load(self, player: str) -> None:
        """Have the generator play a version of the policy, by its number, or a checkpoint."""
        if self._generator is None or player == self._loaded:
            return
        self._loaded = None
        path = player_folder(player, self._folder, self._model_path)
        await self._generator.load_checkpoint.fanout(str(path), next(self._loads))
        self._loaded = player

    async def _make_table(self, name: str, seats: Sequence[str], version: PolicyVersion) -> None:
        """Play each opponent; print the table, append it to `TABLE_FILE`, and keep its metrics."""
        players = [str(each) for each in self.pool.versions(version)] if self._config.has_opponent else []
        functions = [player for player in self._config.environments[name].players.values() if ":" in player]
        fixed = [] if self._config.opponent_source in (None, FROZEN) else [self._source]
        players = list(dict.fromkeys([*players, *fixed, *functions, *self._config.self_play.opponents]))
        rows = [await self._play(name, seats, player, version) for player in players]
        if not rows:
            return
        table = {"iteration": version, "environment": name, "opponents": rows}
        if isinstance(task := self._tasks[name], Task):
            probe = to_floats(await task.probe(self._chat), "probe")
            table |= {EXPLOITABILITY: probe[EXPLOITABILITY]} if EXPLOITABILITY in probe else {}
        with (self._folder / TABLE_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(table) + "\n")
        self._console.print(format_table(table), markup=False, highlight=False, soft_wrap=True)
        for row in rows if version else ():  # the log begins with iteration 1
            prefix = f"{environment_prefix(name)}cross/{row['opponent']}/"
            figures = {"mean": row, **{f"seat/{seat}": row["seats"][seat] for seat in seats}}
            for label, figure in figures.items():
                bounds = figure["ci95"] or (None, None)
                named = zip(("", "_low", "_high"), (figure["mean"], *bounds), strict=True)
                self._metrics |= {f"{prefix}{label}{end}": value for end, value in named if value is not None}

    async def _play(
        self, name: str, seats: Sequence[str], player: str, version: PolicyVersion
    ) -> dict[str, Any]:
        """Play the same held-out deals from every seat against one opponent; return its row."""
        if is_checkpoint(player):
            await self._load(player)
        seatings: list[Seating] = [
            {seat: TRAINED if seat == own else player for seat in seats} for own in seats
        ]
        deals = held_out_seeds(0, self._config.self_play.deals)
        games: dict[int, Trajectory] = {}

        def on_outcome(number: int, outcome: Outcome) -> None:
            if isinstance(outcome, Trajectory):
                games[number] = outcome

        await self._dispatcher.play_held_out(
            [seed for seed in deals for _ in seats],
            on_outcome,
            environment=name,
            temperature=self._config.rollout.temperature,
            seatings=tuple(seatings),
        )
        return make_row(player, seats, len(deals), games)


def initial_player(config: Config) -> str:
    """Return who plays the opponents when a run begins: version 0 of the policy, or the checkpoint in `env.seats`."""
    source = config.opponent_source
    return "0" if source in (None, FROZEN) else str(source)


def opponent_config(config: Config) -> Config:
    """Return the configuration of the opponents' generator, which takes whole weights.

    It has a seed of its own: with the policy's, the engines would draw the same random numbers, and a policy that meets
    its own weights at one prompt, as where all seats act at once, would get its own answers.
    """
    return config.model_copy(
        update={
            "model": config.model.model_copy(update={"lora": None}),
            "seed": (config.seed + 1) % SEED_LIMIT,
        }
    )


def player_folder(player: str, folder: Path, model_path: Path) -> Path:
    """Return the folder of a version of the policy, by its number, or of another checkpoint.

    Raises:
        ConfigError: There is no such folder.
    """
    if player.isdecimal():
        return model_path if player == "0" else folder.absolute() / POLICIES_FOLDER / player
    path = Path(os.path.expanduser(player)).absolute()
    if not path.is_dir():
        raise ConfigError(
            f"expected an opponent to be the folder of a checkpoint, there is none at {str(path)!r}"
        )
    return path


def make_row(
    player: str, seats: Sequence[str], deals: int, games: Mapping[int, Trajectory]
) -> dict[str, Any]:
    """Return a row of the cross-table: the policy's mean reward against an opponent, with its 95% interval.

    Args:
        player: The opponent.
        seats: The policy's seat in successive games.
        deals: How many deals were played from every seat.
        games: The games with a result, by number; each deal has as many in a row as there are seats.

    Returns:
        `opponent`; `seats`, with `mean`, `ci95` and `games` of each; `mean` and `ci95` over deals with a result from
        every seat, each of which counts once, by the mean of its seats; `joint`, what all seats earn together in games
        played to their end; `answers`, the number of the policy's answers, and `illegal`, of those that were no action;
        `lost`, the number of games without a result.
    """
    by_seat: dict[str, list[float]] = {seat: [] for seat in seats}
    for number, game in games.items():
        by_seat[seats[number % len(seats)]].append(game.reward)
    tables = [range(deal * len(seats), (deal + 1) * len(seats)) for deal in range(deals)]
    whole = [[games[number].reward for number in table] for table in tables if all(n in games for n in table)]
    joint = [
        game.reward + game.others
        for game in games.values()
        if game.others is not None and game.ending is Ending.COMPLETED
    ]
    return {
        "opponent": player,
        "seats": {seat: {**estimate(rewards), "games": len(rewards)} for seat, rewards in by_seat.items()},
        **estimate([math.fsum(rewards) / len(rewards) for rewards in whole]),
        "joint": estimate(joint),
        "answers": sum(game.summarize().turns for game in games.values()),
        "illegal": sum(game.ending in ILL_FORMED for game in games.values()),
        "lost": deals * len(seats) - len(games),
    }


def estimate(values: Sequence[float]) -> dict[str, Any]:
    """Return the mean and its 95% interval; None where there are too few values."""
    return {"mean": math.fsum(values) / len(values) if values else None, "ci95": mean_interval(values)}


def format_table(table: Mapping[str, Any]) -> str:
    """Return a cross-table for the console, a line for each opponent."""
    exact = f"; exploitability {table[EXPLOITABILITY]:.4g}" if EXPLOITABILITY in table else ""
    lines = [f"cross-table of iteration {table['iteration']}{exact}"]
    for row in table["opponents"]:
        figures = [_format_figure(f"{seat} ", figure) for seat, figure in row["seats"].items()]
        lines.append(f"  against {row['opponent']}: {_format_figure('', row)}; {', '.join(figures)}")
    return "\n".join(lines)


def _format_figure(label: str, figure: Mapping[str, Any]) -> str:
    mean = "-" if figure["mean"] is None else f"{figure['mean']:.3f}"
    return label + mean + ("" if figure["ci95"] is None else " ({:.3f} to {:.3f})".format(*figure["ci95"]))
