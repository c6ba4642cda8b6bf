"""The negotiation for a small chat model: what it reads, and what its messages mean."""

from pathlib import Path

import pytest

from envs.negotiation_env import NegotiationAction
from envs.negotiation_env.division import worth
from envs.negotiation_env.models import ITEMS
from envs.negotiation_env.server.environment import NegotiationEnvironment
from examples.grpo_negotiation import task as example
from examples.grpo_negotiation.task import NegotiationTask, describe, read_message
from rl_bridge.config import load_config, resolve


def test_messages_take_all_of_a_kind_or_accept_an_offer() -> None:
    game = NegotiationEnvironment()
    first = game.reset(seed=3)["first"]
    worths = [first.items[item] * first.values[item] for item in ITEMS]
    assert describe(first) == f"A {worths[0]} B {worths[1]} C {worths[2]}"
    assert sum(worths) == 10
    assert [read_message(text, first) for text in ("yes", "D", "A B", "")] == [None] * 4
    take = read_message(" B\n", first)
    assert take == NegotiationAction(message="I take the hats.", take={"hats": first.items["hats"]})
    second = game.step({"first": take})["second"]
    assert describe(second).endswith(f" offer {worth(second.offer or {}, second.values)}")
    accept = read_message("yes", second)
    assert accept is not None
    ended = game.step({"second": accept})
    assert [seen.reward for seen in ended.values()] == [
        pytest.approx(worths[1] / 10),
        pytest.approx(worth(second.offer or {}, second.values) / 10),
    ]


def test_the_configuration_that_ships_trains_both_seats_against_the_initial_policy(tmp_path: Path) -> None:
    config = load_config(Path(example.__file__).with_name("config.yaml"))
    assert resolve(config.rollout.task, key="rollout.task") is NegotiationTask
    assert set(config.environment.seats) == set(NegotiationEnvironment.seats)
    assert (config.opponent_source, config.environment.exchange_seats) == ("frozen", True)
    assert (config.self_play.pool_interval, config.self_play.table_interval) == (0, config.trainer.iterations)
    chat = NegotiationTask(config, tmp_path).messages(NegotiationEnvironment().reset(seed=1)["first"])
    assert [message["role"] for message in chat] == ["system", *["user", "assistant"] * 4, "user"]
