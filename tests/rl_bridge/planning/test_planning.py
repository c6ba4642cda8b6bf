"""The calculators against the guide's metrics, and what each role keeps against sums worked out by hand."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rl_bridge.config import Config, load_config
from rl_bridge.planning.memory import ModelSize, RoleMemory, memory_of_roles, sent_bytes
from rl_bridge.planning.plan import RentedFleet, RunPlan, gpus_of

SIZE = ModelSize(parameters=1000, vocabulary=50, cached_per_token=12, output_layer=250, width=5)
FILE = """
env: {app: 'a:b'}
rollout: {task: 'c:D', max_length: 32, max_new_tokens: 8, max_num_seqs: 4}
trainer: {tokens_per_chunk: 16}
"""


def loaded(tmp_path: Path, *overrides: str) -> Config:
    file = tmp_path / "run.yaml"
    file.write_text(FILE)
    return load_config(file, overrides)


@pytest.mark.parametrize(
    ("monarch", "times"),
    [
        ({"num_nodes": 8, "gpus_per_node": 8, "roles": {"policy": {"replicas": 14, "gpus": 1}}}, 14),
        # Sixteen hosts send, and two with eight generators each receive.
        (
            {
                "num_nodes": 18,
                "gpus_per_node": 8,
                "roles": {
                    "policy": {"replicas": 16, "gpus": 1},
                    "trainer": {"procs": 8, "hosts": 16, "gpus": 128},
                },
            },
            8,
        ),
        # Six ranks on each of two hosts, which have room for two generators each.
        (
            {
                "num_nodes": 2,
                "gpus_per_node": 8,
                "roles": {
                    "policy": {"replicas": 4, "gpus": 1},
                    "trainer": {"procs": 6, "hosts": 2, "gpus": 12},
                },
            },
            2,
        ),
        ({"roles": {"policy": {"replicas": 3}}}, 3),
        # A file that does not say yet what its hosts have is planned all the same.
        ({"num_nodes": 2, "roles": {"policy": {"replicas": 4, "gpus": 1}}}, 4),
        # Its volume is on the controller's host, whatever the trainer is.
        (
            {
                "transport": "torchstore",
                "num_nodes": 8,
                "roles": {"policy": {"replicas": 4}, "trainer": {"hosts": 4}},
            },
            4,
        ),
    ],
)
def test_how_often_a_version_goes_over_the_narrowest_link(monarch: dict[str, Any], times: int) -> None:
    config = Config.model_validate({"env": {"app": "a:b"}, "rollout": {}, "monarch": monarch})
    (told,) = RunPlan().with_broadcasts(140e9, [100.0], None, config).broadcasts
    assert told.seconds == pytest.approx(11.2)
    assert told.all_seconds == pytest.approx(11.2 * times)


def test_kinds_of_gpus_with_prices_of_their_own() -> None:
    fleet = RentedFleet(
        spot_gpus=10,
        on_demand_gpus=2,
        spot_price=1.0,
        on_demand_price=5.0,
        spot_kind_on_demand_price=3.0,
        hours=1,
    )
    # 10 + 10, instead of 30 + 10.
    assert (fleet.cost, fleet.all_on_demand, fleet.saved_share) == (20.0, 40.0, 0.5)


def roles(config: Config, reward_model: ModelSize | None = None) -> dict[str, RoleMemory]:
    return {role.role: role for role in memory_of_roles(config, SIZE, reward_model)}


def test_memory_of_the_smallest_run(tmp_path: Path) -> None:
    found = roles(loaded(tmp_path))
    assert set(found) == {"trainer", "policy"}
    assert found["trainer"].parts == {"master weights": 4000, "gradients": 4000, "Adam's moments": 8000}
    # Twice 16 tokens x 50 words x 4 bytes.
    assert found["trainer"].per_process == {"logits of a chunk": 6400}
    assert found["trainer"].process_bytes == 16_000 + 6400
    assert found["policy"].parts == {"weights": 4000, "key-value cache": 256 * 1024 * 1024}
    assert found["policy"].process_bytes == 4000 + 256 * 1024 * 1024
    # 4 prompts x 32 tokens x 12 numbers x 4 bytes.
    assert found["policy"].at_best == {"a full key-value cache": 6144}


@pytest.mark.parametrize("override", ["algorithm.name=ppo", "algorithm=ppo", "algorithm.advantage=gae"])
def test_critic_is_counted_however_it_was_asked_for(tmp_path: Path, override: str) -> None:
    # 1000 without 50 x 5 of the output layer, and 5 of the value head.
    assert roles(loaded(tmp_path, override))["trainer"].parts["critic"] == 16 * 755


def test_vocabulary_is_shared_by_tensor_parallel_ranks(tmp_path: Path) -> None:
    config = loaded(tmp_path, "monarch.roles.trainer={procs: 4}", "trainer.tensor_parallel=4")
    assert roles(config)["trainer"].per_process == {"logits of a chunk": 2 * 16 * 13 * 4}


def test_generator_has_to_fit_in_its_share_of_a_gpu(tmp_path: Path) -> None:
    found = roles(
        loaded(
            tmp_path,
            "model.dtype=fp32",
            "monarch.roles.policy={gpus: 1}",
            "rollout.gpu_memory_utilization=0.5",
        )
    )
    policy = found["policy"]
    # 1000 x 4, and one row of 32 tokens x 12 numbers x 4 bytes, without which the engine does not start.
    assert policy.process_bytes == 4000 + 1536
    assert (policy.fits(2 * 5536), policy.fits(2 * 5536 - 1)) == (True, False)
    assert found["trainer"].fits(found["trainer"].process_bytes)


def test_memory_of_a_run_with_everything(tmp_path: Path) -> None:
    found = roles(
        loaded(
            tmp_path,
            "model.dtype=bfloat16",
            "algorithm.kl_coef=0.1",
            "algorithm.name=ppo",
            "monarch.roles.trainer={procs: 3, hosts: 2}",
            "monarch.roles.policy={replicas: 5, gpus: 1}",
        ),
        reward_model=ModelSize(parameters=10),
    )
    assert set(found) == {"trainer", "policy", "reference", "reward"}
    assert found["trainer"].parts["critic"] == 16 * 755
    # 28,080 over two hosts of three ranks, and logits of each.
    assert found["trainer"].process_bytes == 4_680 + 6400
    assert found["policy"].replicas == 5
    assert found["policy"].parts == {"weights": 2000, "key-value cache of the longest row": 768}
    assert found["policy"].at_best == {"a full key-value cache": 3072}
    assert (found["reference"].parts, found["reward"].process_bytes) == ({"weights": 4000}, 40)
    assert found["reference"].process_bytes == 4000 + 6400


def test_gpus_that_may_be_taken_away(tmp_path: Path) -> None:
    table = ["trainer.num_gpus=2", "rollout.num_workers=14", "algorithm.kl_coef=0.1"]
    assert gpus_of(loaded(tmp_path, *table)) == (0, 17)
    assert gpus_of(loaded(tmp_path, *table, "rollout.spot_eligible=true")) == (14, 3)


def test_adapters_are_all_that_is_trained_sent_and_doubled(tmp_path: Path) -> None:
    # Two blocks: 8 + 6 rows and columns of q_proj, 8 + 20 of down_proj.
    size = replace(SIZE, linear={"q_proj": 28, "down_proj": 56})
    overrides = ["model.lora.rank=3", "model.lora.targets=[q_proj, down_proj]", "algorithm.kl_coef=0.1"]
    whole = loaded(tmp_path, *overrides, "algorithm.advantage=gae")
    trainer, _ = memory_of_roles(whole, size)  # and no reference
    adapters = 3 * (28 + 56)
    assert dict(trainer.parts) == {
        "frozen weights": 4000,
        "adapters": 16 * adapters,
        "critic": 4 * 755 + 16 * adapters,
    }
    assert sent_bytes(size, whole) == 4000
    assert sent_bytes(size, loaded(tmp_path, *overrides, "model.lora.push=adapter")) == 4 * adapters
    plan = RunPlan().with_memory(size, whole)
    assert (plan.adapters, plan.trainer_bytes) == (adapters, 4000 + 16 * adapters)
