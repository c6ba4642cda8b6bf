"""The calculators against the guide's figures, and the memory of each role against sums by hand."""

from dataclasses import replace
from pathlib import Path

import pytest

from rl_bridge.config import Config, load_config
from rl_bridge.planning import (
    USABLE_SHARE,
    ModelSize,
    RentedFleet,
    RoleMemory,
    RunPlan,
    bytes_by_checkpointing,
    choose_checkpointing,
    memory_of_roles,
    split_spot_gpus,
    with_checkpointing,
)
from rl_bridge.titan.architecture import architecture_of

KEY = "trainer.activation_checkpointing"
SHAPES = {
    "model_type": "qwen2",  # which has no norms of queries and keys
    "hidden_size": 5,
    "intermediate_size": 7,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 3,
    "vocab_size": 50,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
}
SIZE = ModelSize(parameters=1000, architecture=architecture_of(SHAPES, where="here"))
LAYER = 5 * 6 + 5 * 3 * 2 + 6 * 5 + 3 * 5 * 7 + 2 * 5 + 6 + 3 + 3
KEPT = 4 * (4 * 7 + 3 * 5 + 2 * 9) + 4 * (4 * 5 + 2 * 9)
"""Bytes that a block saves of a token in float32."""
ON_THEIR_WAY = "2 versions of the weights on their way"
COLOCATED = ("monarch.colocate=true", "model.dtype=bfloat16")
CHECKPOINT = {"weights and moments, to be written to a checkpoint": 12_000}
FILE = """
env: {app: 'a:b'}
rollout: {task: 'c:D', max_length: 32, max_new_tokens: 8, max_num_seqs: 4}
trainer: {tokens_per_chunk: 16, tokens_per_pass: 100, share_prefixes: false}
"""


def load(tmp_path: Path, *overrides: str) -> Config:
    file = tmp_path / "run.yaml"
    file.write_text(FILE)
    return load_config(file, overrides)


@pytest.mark.parametrize(
    ("monarch", "times"),
    [
        ("{num_nodes: 8, gpus_per_node: 8, roles: {policy: {replicas: 14, gpus: 1}}}", 14),
        # Sixteen hosts send, and two with eight generators each receive.
        (
            "{num_nodes: 18, gpus_per_node: 8, roles: {policy: {replicas: 16, gpus: 1},"
            " trainer: {procs: 8, hosts: 16, gpus: 128}}}",
            8,
        ),
        # Six ranks on each of two hosts, which have room for two generators each.
        (
            "{num_nodes: 2, gpus_per_node: 8, roles: {policy: {replicas: 4, gpus: 1},"
            " trainer: {procs: 6, hosts: 2, gpus: 12}}}",
            2,
        ),
        ("{roles: {policy: {replicas: 3}}}", 3),
        # A file that does not say yet what its hosts have is planned all the same.
        ("{num_nodes: 2, roles: {policy: {replicas: 4, gpus: 1}}}", 4),
        # Its volume is on the controller's host, whatever the trainer is.
        ("{transport: torchstore, num_nodes: 8, roles: {policy: {replicas: 4}, trainer: {hosts: 4}}}", 4),
    ],
)
def test_how_often_a_version_goes_over_the_narrowest_link(monarch: str, times: int, tmp_path: Path) -> None:
    config = load(tmp_path, f"monarch={monarch}")
    (broadcast,) = RunPlan().with_broadcasts(140e9, [100.0], None, config).broadcasts
    assert broadcast.seconds == pytest.approx(11.2)
    assert broadcast.all_seconds == pytest.approx(11.2 * times)


def test_kinds_of_gpus_with_prices_of_their_own() -> None:
    prices = {"spot_price": 1.0, "on_demand_price": 5.0, "spot_kind_on_demand_price": 3.0}
    fleet = RentedFleet(spot_gpus=10, on_demand_gpus=2, hours=1, **prices)
    # 10 + 10, instead of 30 + 10.
    assert (fleet.cost, fleet.all_on_demand, fleet.saved_share) == (20.0, 40.0, 0.5)


def roles(config: Config, reward_model: ModelSize | None = None) -> dict[str, RoleMemory]:
    return {role.role: role for role in memory_of_roles(config, SIZE, reward_model)}


def test_an_opponent_takes_as_much_as_the_policy(tmp_path: Path) -> None:
    found = roles(load(tmp_path, "env.seats={first: policy, second: frozen}"))
    assert set(found) == {"trainer", "policy", "opponent"}
    assert found["opponent"] == replace(found["policy"], role="opponent")


def test_memory_of_the_smallest_run(tmp_path: Path) -> None:
    found = roles(load(tmp_path))
    assert set(found) == {"trainer", "policy"}
    trainer, policy = found["trainer"], found["policy"]
    assert trainer.parts == {"master weights": 4000, "gradients": 4000, "Adam's moments": 8000}
    assert trainer.per_process == {
        # Two blocks, and embedding, last norm, what the output layer is given.
        "activations": 100 * (2 * KEPT + 12 * 5),
        # A block, the next, the gradient and what of it is reduced; and the gradients of what the block keeps.
        "gathered layers": 16 * LAYER,
        "a block's backward pass": 100 * KEPT,
    }
    # With many logits the last layer needs more: its weight with its gradient, and the block before it.
    found_with_logits = roles(load(tmp_path, "trainer.tokens_per_chunk=160"))["trainer"].per_process
    assert found_with_logits == {
        "activations": trainer.per_process["activations"],
        "logits of a chunk": 2 * 160 * 50 * 4,
        "gathered layers": 8 * 250 + 4 * LAYER,
    }
    assert trainer.process_bytes == 16_000 + sum(trainer.per_process.values())
    assert trainer.host == {ON_THEIR_WAY: 8000} | CHECKPOINT
    assert roles(load(tmp_path, "trainer.checkpoint_interval=0"))["trainer"].host == {ON_THEIR_WAY: 8000}
    assert policy.parts == {"weights": 4000, "key-value cache": 256 * 1024 * 1024}
    assert policy.per_process == {"a tensor of new weights": 1000}
    # 4 prompts x 32 tokens x 2 x 2 layers x 1 x 3 numbers x 4 bytes.
    assert policy.at_best == {"a full key-value cache": 6144}
    assert policy.host == {}, "it reads the trainer's memory"


def test_shared_prefixes_take_copies_of_keys_and_values(tmp_path: Path) -> None:
    def activations(*overrides: str) -> int:
        memory = roles(load(tmp_path, *overrides))["trainer"].per_process
        return memory["activations"] + memory["a block's backward pass"]

    copies = 4 * 2 * 3 * 4  # of keys and values, each of one head of 3 numbers
    assert activations("trainer.share_prefixes=true") - activations() == 100 * 3 * copies
    on_gpu = ("trainer.num_gpus=1", "model.dtype=float32")
    difference = activations(*on_gpu, "trainer.share_prefixes=true") - activations(*on_gpu)
    assert difference == 100 * 2 * 2 * copies, (
        "of two blocks with recomputed activations, for each of two heads"
    )
    for without in ("model.dtype=bfloat16", "trainer.compile=true"):
        assert activations(without, "trainer.share_prefixes=true") == activations(without)


@pytest.mark.parametrize(("max_length", "keys"), [(32, 32 + 64), (400, 400 + 100)])
def test_shared_prefixes_take_a_mask(tmp_path: Path, max_length: int, keys: int) -> None:
    length = f"rollout.max_length={max_length}"
    shared, apart = (
        roles(load(tmp_path, length, f"trainer.share_prefixes={shares}", "algorithm.kl_coef=0.1"))
        for shares in ("true", "false")
    )
    for role in ("trainer", "reference"):
        mask = set(shared[role].per_process.items()) - set(apart[role].per_process.items())
        assert ("mask of shared prefixes", 6 * max(100, max_length) * keys) in mask


def test_on_gpus_a_block_keeps_little_and_rows_that_are_longer_than_a_pass_count(tmp_path: Path) -> None:
    gpus = ["model.dtype=bfloat16", "trainer.num_gpus=2"]
    config = load(tmp_path, *gpus, "rollout.max_length=60", "trainer.tokens_per_pass=50")
    found = roles(config)["trainer"].per_process
    block = 2 * (4 * 7 + 4 * 5 + 3 * 9)
    assert found["activations"] == 60 * (2 * 5 * 2 + 10 * 5)
    assert found["a block's backward pass"] == 60 * 2 * block
    assert found["gathered layers"] == (3 * 2 + 4) * LAYER
    # Attention's 6, and half of 6 + 2 x 3 + 2 x 7 + 2 x 5.
    more = 60 * 2 * (6 + 18) * 2
    selective = roles(with_checkpointing(config, "selective"))["trainer"].per_process
    assert selective["activations"] == found["activations"] + more


def test_as_little_is_computed_anew_as_there_is_room_for(tmp_path: Path) -> None:
    size = ModelSize(
        parameters=1000, architecture=architecture_of(SHAPES | {"num_hidden_layers": 8}, where="here")
    )
    config = load(tmp_path, "trainer.num_gpus=1", "monarch.colocate=true")
    assert config.trainer.activation_checkpointing == "auto"
    needed = bytes_by_checkpointing(config, size)
    assert list(needed) == ["none", "selective", "full"]
    assert needed["none"] > needed["selective"] > needed["full"]
    for kind, less in (("none", "selective"), ("selective", "full"), ("full", "full")):
        enough = needed[kind] / USABLE_SHARE
        assert choose_checkpointing(needed, enough) == kind
        assert choose_checkpointing(needed, enough - 2) == less
        there = memory_of_roles(with_checkpointing(config, kind), size)[0]
        assert there.process_bytes == needed[kind]
    # `ropewalk plan` counts the least, until it is told of the card.
    plan = RunPlan().with_memory(size, config)
    assert (plan.roles[0].process_bytes, plan.decided[KEY]) == (needed["full"], "auto")
    plan = RunPlan().with_memory(size, config, gpu_bytes=needed["selective"] / USABLE_SHARE)
    assert (plan.roles[0].process_bytes, plan.decided[KEY]) == (needed["selective"], "selective")
    # Of a model whose shapes nobody knows nothing is promised.
    assert choose_checkpointing(bytes_by_checkpointing(config, ModelSize(parameters=1000)), 1e15) == "full"


def test_every_replica_of_the_weights_has_its_own(tmp_path: Path) -> None:
    one, two = (
        roles(load(tmp_path, "monarch.roles.trainer={procs: 4}", f"trainer.parallel.hsdp={replicas}"))
        for replicas in (1, 2)
    )
    held = sum(one["trainer"].parts.values())
    assert sum(two["trainer"].parts.values()) == 2 * held
    assert two["trainer"].process_bytes - one["trainer"].process_bytes == held // 4


def test_the_ranks_of_a_reference_share_it(tmp_path: Path) -> None:
    spread = ("monarch.roles={trainer: {procs: 4}, reference: {procs: 2}}", "trainer.parallel.tp=2")
    one, two = (
        roles(load(tmp_path, "algorithm.kl_coef=0.1", *overrides))["reference"] for overrides in ((), spread)
    )
    assert (two.processes, two.parts) == (2, one.parts)
    assert two.per_process["activations"] == one.per_process["activations"] // 2


def test_tensor_parallel_ranks_share_a_pass(tmp_path: Path) -> None:
    alone = roles(load(tmp_path))["trainer"].per_process
    config = load(tmp_path, "monarch.roles.trainer={procs: 4}", "trainer.tensor_parallel=4")
    found = roles(config)["trainer"].per_process
    assert found["activations"] == alone["activations"] // 4
    assert found["gathered layers"] == 16 * (LAYER // 4)


@pytest.mark.parametrize(("push", "sent"), [("merged", 4000), ("adapter", 4 * 2 * 3 * (5 + 6 + 7 + 5))])
def test_adapters_alone_are_trained(tmp_path: Path, push: str, sent: int) -> None:
    lora = f"model.lora={{rank: 3, targets: [q_proj, down_proj], push: {push}}}"
    config = load(tmp_path, lora, "algorithm.kl_coef=0.1", "algorithm.name=ppo")
    found = roles(config)
    assert set(found) == {"trainer", "policy"}, "the model without its adapters is the reference"
    adapters = 16 * 2 * 3 * (5 + 6 + 7 + 5)
    critic = 4 * 755 + adapters
    assert found["trainer"].parts == {"frozen weights": 4000, "adapters": adapters, "critic": critic}
    assert found["trainer"].host == {
        ON_THEIR_WAY: 2 * sent,
        "weights and moments, to be written to a checkpoint": 2 * 12 * adapters // 16,
    }
    plan = RunPlan().with_memory(SIZE, config)
    assert (plan.adapters, plan.trainer_bytes) == (adapters // 16, 4000 + adapters)


@pytest.mark.parametrize(
    ("overrides", "trainer", "policy"),
    [
        (["monarch.transport=rdma"], {ON_THEIR_WAY: 8000}, 4000),
        (["monarch.workers=[tcp://10.0.0.2:1]", "monarch.master_addr=10.0.0.1"], {ON_THEIR_WAY: 8000}, 4000),
        (
            ["monarch.transport=torchstore"],
            {"a version that is being put": 4000, "2 versions in the volume, on the controller's host": 8000},
            4000,
        ),
        (["generator.engine=vllm_async"], {ON_THEIR_WAY: 8000}, 4000),
        (["generator.engine=vllm_async", "monarch.transport=rdma"], {ON_THEIR_WAY: 8000}, 8000),
    ],
)
def test_weights_on_their_way_are_held_where_the_transport_has_them(
    tmp_path: Path, overrides: list[str], trainer: dict[str, int], policy: int
) -> None:
    found = roles(load(tmp_path, *overrides))
    assert (found["trainer"].host, sum(found["policy"].host.values())) == (trainer | CHECKPOINT, policy)


def test_versions_kept_on_the_gpu_are_counted_for_each_rank_and_colocated_role(tmp_path: Path) -> None:
    keys = [*COLOCATED, "trainer.num_gpus=2", "generator.engine=vllm_async"]
    before = roles(load(tmp_path, *keys))
    found = roles(load(tmp_path, *keys, "monarch.transport=cuda_ipc"))
    assert before["trainer"].host.pop(ON_THEIR_WAY) == 4000
    assert before["policy"].host.pop("a version handed to the engine's process") == 2000
    for role in ("trainer", "policy"):
        assert found[role].host == before[role].host
        assert found[role].per_process == before[role].per_process | {ON_THEIR_WAY: 2000}
        assert found[role].parts == before[role].parts


def test_colocated_roles_leave_to_the_host_s_memory_what_they_keep(tmp_path: Path) -> None:
    found = roles(load(tmp_path, *COLOCATED, "trainer.num_gpus=1", "algorithm.kl_coef=0.1"))
    assert found["trainer"].host["what it trains, in the generators' turn"] == 12_000
    # Of vLLM's pages each may be rounded up to twice its size.
    assert list(found["policy"].host.values()) == [4000]
    assert found["reference"].host == {"weights, in others' turns": 4000}


def test_generator_has_to_fit_in_its_share_of_a_gpu(tmp_path: Path) -> None:
    half = ["monarch.roles.policy={gpus: 1}", "rollout.gpu_memory_utilization=0.5"]
    found = roles(load(tmp_path, "model.dtype=fp32", *half))
    policy = found["policy"]
    # 1000 x 4, one row of 32 tokens x 12 numbers x 4 bytes, without which the engine does not start, and the largest of
    # new tensors.
    assert policy.process_bytes == 4000 + 1536 + 1000
    assert (policy.fits(2 * 6536), policy.fits(2 * 6536 - 1)) == (True, False)
    assert policy.free_bytes(2 * 6536 + 20) == 10
    assert found["trainer"].fits(found["trainer"].process_bytes)


def test_memory_of_a_run_with_everything(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        "model.dtype=bfloat16",
        "algorithm.kl_coef=0.1",
        "algorithm.advantage=gae",
        "monarch.roles.trainer={procs: 3, hosts: 2}",
        "monarch.roles.policy={replicas: 5, gpus: 1}",
    )
    found = roles(config, reward_model=ModelSize(parameters=10))
    assert set(found) == {"trainer", "policy", "reference", "reward"}
    trainer, reference = found["trainer"], found["reference"]
    # 28,080 over two hosts of three ranks, and a pass of each.
    assert trainer.process_bytes == 4_680 + sum(trainer.per_process.values())
    assert found["policy"].replicas == 5
    assert found["policy"].parts == {"weights": 2000, "key-value cache of the longest row": 768}
    assert found["policy"].at_best == {"a full key-value cache": 3072}
    assert (reference.parts, found["reward"].process_bytes) == ({"weights": 4000}, 40)
    block = 2 * (4 * 7 + 3 * 5 + 2 * 9) + 4 * (4 * 5 + 2 * 9)
    assert reference.per_process == {
        "logits of a chunk": 6400,
        "gathered layers": 2 * (250 + 2 * LAYER),
        "activations": 100 * (block + 10 * 5),
    }


def test_gpus_that_may_be_taken_away(tmp_path: Path) -> None:
    table = ["trainer.num_gpus=2", "rollout.num_workers=14", "algorithm.kl_coef=0.1"]
    assert split_spot_gpus(load(tmp_path, *table)) == (0, 17)
    assert split_spot_gpus(load(tmp_path, *table, "rollout.spot_eligible=true")) == (14, 3)
