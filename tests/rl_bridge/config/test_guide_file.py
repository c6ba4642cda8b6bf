"""The file of the field's cluster guide: it loads as printed, and trains once model, task and hosts are named."""

from pathlib import Path

import pytest

from rl_bridge.config import Config, load_config, require_trainable
from rl_bridge.errors import ConfigError

GUIDE = Path(__file__).with_name("guide.yaml")
HERE = ("monarch.num_nodes=1", "monarch.gpus_per_node=0", "trainer.num_gpus=0")
PLAYS = (
    "env.app=envs.blackjack_env.server.app:app",
    "rollout.task=examples.grpo_blackjack.task:BlackjackTask",
)


def refusal(config: Config) -> str:
    with pytest.raises(ConfigError) as caught:
        require_trainable(config)
    return str(caught.value)


def test_its_gpus_are_shared_out() -> None:
    config = load_config(GUIDE)
    roles = config.monarch.roles
    assert (config.algorithm.name, config.model.dtype, config.rollout.num_workers) == ("grpo", "bfloat16", 14)
    # 14 generators and 2 ranks, of the 64 GPUs of 8 hosts.
    assert (roles.policy.replicas, roles.trainer.procs, roles.gpus()) == (14, 2, 16)
    assert config.monarch.num_nodes * config.monarch.gpus_per_node == 64


def test_training_is_refused_until_it_is_told_on_what() -> None:
    message = refusal(load_config(GUIDE, HERE))
    assert ["env.*" in message, "data.*" in message, "monarch" in message] == [True, True, False]


def test_training_on_hosts_is_refused_until_they_can_be_reached() -> None:
    message = refusal(load_config(GUIDE, PLAYS))
    assert ["the addresses of 8 hosts" in message, "env.*" in message] == [True, False]
    require_trainable(load_config(GUIDE, [*PLAYS, "monarch.job=mine:job"]))
    require_trainable(load_config(GUIDE, [*PLAYS, f"monarch.workers={[f'tcp://h{n}:1' for n in range(8)]}"]))
    assert "got 1 addresses" in refusal(load_config(GUIDE, [*PLAYS, "monarch.workers=[tcp://h:1]"]))


def test_weights_stay_on_a_gpu_only_where_trainer_and_generators_share_it() -> None:
    words = [*PLAYS, "monarch.num_nodes=1", "monarch.transport=cuda_ipc", "rollout.max_staleness=0"]
    message = "expected monarch.colocate=true and generators that each have all of the trainer's GPUs"
    assert message in refusal(load_config(GUIDE, [*words, "trainer.num_gpus=1"]))
    assert message in refusal(load_config(GUIDE, [*words, "trainer.num_gpus=2", "monarch.colocate=true"]))
    require_trainable(load_config(GUIDE, [*words, "trainer.num_gpus=1", "monarch.colocate=true"]))


@pytest.mark.parametrize("url", ["[http://one:8000, two:8000]", "'http://[::1'"])
def test_an_address_that_no_client_would_take_is_refused(url: str) -> None:
    message = refusal(load_config(GUIDE, ["env.app=null", f"env.url={url}"]))
    assert "env.url: expected a URL that starts with http://" in message


@pytest.mark.parametrize("learned_from", [PLAYS, ("data.source=prompts.jsonl",)])
def test_with_overrides_it_is_ready(learned_from: tuple[str, ...]) -> None:
    config = load_config(GUIDE, [*HERE, *learned_from, "model.path=/m", "reward.function=mine.compute"])
    require_trainable(config)
    assert config.monarch.roles.gpus() == 0
