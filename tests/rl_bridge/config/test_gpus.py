"""`trainer.num_gpus` and the role table."""

from pathlib import Path

import pytest

from rl_bridge.config import Config, colocate_if_needed, load_config
from rl_bridge.errors import ConfigError

FILE = "env: {app: 'a:b'}\nrollout: {task: 'c:D', num_workers: 14}\n"


def loaded(tmp_path: Path, *overrides: str) -> Config:
    file = tmp_path / "run.yaml"
    file.write_text(FILE)
    return load_config(file, overrides)


def rows(config: Config) -> tuple[tuple[int, int, int, int], ...]:
    table = config.monarch.roles
    return tuple(
        (r.replicas, r.procs, r.hosts, r.gpus) for r in (table.trainer, table.policy, table.reference)
    )


@pytest.mark.parametrize(
    ("overrides", "trainer", "policy", "reference"),
    [
        ([], (1, 1, 1, 0), (1, 1, 1, 0), (1, 1, 1, 0)),
        (["trainer.num_gpus=0"], (1, 1, 1, 0), (1, 1, 1, 0), (1, 1, 1, 0)),
        (
            ["trainer.num_gpus=2", "algorithm.kl_coef=0.1", "monarch.gpus_per_node=8"],
            (1, 2, 1, 2),
            (5, 1, 1, 1),
            (1, 1, 1, 1),
        ),
        (
            ["trainer.num_gpus=16", "monarch.gpus_per_node=8", "monarch.num_nodes=8"],
            (1, 8, 2, 16),
            (14, 1, 1, 1),
            (1, 1, 1, 0),
        ),
        (
            ["trainer.num_gpus=1", "monarch.roles.policy={replicas: 3}", "monarch.roles.trainer={gpus: 1}"],
            (1, 1, 1, 1),
            (3, 1, 1, 0),
            (1, 1, 1, 0),
        ),
        # Too few for both: they take turns.
        (["trainer.num_gpus=1", "monarch.gpus_per_node=1"], (1, 1, 1, 1), (1, 1, 1, 1), (1, 1, 1, 0)),
        (
            ["trainer.num_gpus=4", "monarch.gpus_per_node=4", "algorithm.kl_coef=0.1"],
            (1, 4, 1, 4),
            (4, 1, 1, 1),
            (1, 1, 1, 1),
        ),
        (
            ["trainer.num_gpus=2", "monarch.gpus_per_node=8", "monarch.colocate=true"],
            (1, 2, 1, 2),
            (2, 1, 1, 1),
            (1, 1, 1, 0),
        ),
        (
            ["trainer.num_gpus=1", "monarch.gpus_per_node=8", "generator.tensor_parallel=2"],
            (1, 1, 1, 1),
            (3, 1, 1, 2),
            (1, 1, 1, 0),
        ),
        (
            ["trainer.num_gpus=4", "monarch.gpus_per_node=5", "generator.tensor_parallel=2"],
            (1, 4, 1, 4),
            (2, 1, 1, 2),
            (1, 1, 1, 0),
        ),
    ],
)
def test_what_the_table_leaves_open_follows(
    tmp_path: Path,
    overrides: list[str],
    trainer: tuple[int, ...],
    policy: tuple[int, ...],
    reference: tuple[int, ...],
) -> None:
    assert rows(loaded(tmp_path, *overrides)) == (trainer, policy, reference)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (
            ["trainer.num_gpus=2", "monarch.roles.trainer={gpus: 1}"],
            "as monarch.roles.trainer.gpus says, 1, got 2",
        ),
        (
            ["trainer.num_gpus=9", "monarch.gpus_per_node=8", "monarch.num_nodes=2"],
            "fill each of its 2 hosts",
        ),
        (
            [
                "trainer.num_gpus=1",
                "monarch.gpus_per_node=2",
                "algorithm.kl_coef=0.1",
                "monarch.colocate=false",
            ],
            "got 1 beside one for the reference model (algorithm.kl_coef) of the 2 GPUs of monarch.num_nodes x "
            "gpus_per_node; have them take turns by monarch.colocate=true",
        ),
        (
            ["trainer.num_gpus=4", "monarch.gpus_per_node=4", "monarch.roles.policy={gpus: 1}"],
            "at most the 4 GPUs of num_nodes x gpus_per_node, got 5",
        ),
        (
            ["trainer.num_gpus=2", "monarch.colocate=true", "monarch.roles.policy={gpus: 1}"],
            "as many GPUs as the trainer with monarch.colocate, 2, got 1 with 1 each",
        ),
        (
            ["monarch.colocate=true", "rollout.max_staleness=1"],
            "max_staleness of 0 with monarch.colocate, got 1",
        ),
        (
            [
                "monarch.colocate=true",
                "rollout.max_staleness=1",
                "rollout.weight_update=continue",
                "rollout.episode_timeout_s=60",
            ],
            "no rollout.episode_timeout_s with monarch.colocate",
        ),
    ],
)
def test_what_cannot_be_shared_out_is_refused(tmp_path: Path, overrides: list[str], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, *overrides)
    assert told in str(caught.value)


def test_machine_with_too_few_gpus_for_both_has_them_take_turns(tmp_path: Path) -> None:
    asked = loaded(tmp_path, "trainer.num_gpus=1")  # of what machine nobody has said
    assert asked.monarch.gpus == 15
    alone = colocate_if_needed(asked, 1)
    assert (alone.monarch.colocate, alone.monarch.gpus, rows(alone)[1]) == (True, 1, (1, 1, 1, 1))
    assert colocate_if_needed(alone, 1) is alone  # a run that goes on
    for gpus in (0, 15):  # none, which no turn makes up for, and enough
        assert colocate_if_needed(asked, gpus) is asked
    refused = loaded(tmp_path, "trainer.num_gpus=1", "monarch.colocate=false")
    assert colocate_if_needed(refused, 1) is refused
    with pytest.raises(ConfigError, match=r"max_staleness of 0 with monarch\.colocate"):
        colocate_if_needed(loaded(tmp_path, "trainer.num_gpus=1", "rollout.max_staleness=1"), 1)
