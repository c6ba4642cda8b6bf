"""`trainer.num_gpus` and the role table."""

from pathlib import Path

import pytest

from rl_bridge.config import Config, load_config
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
            ["trainer.num_gpus=1", "monarch.gpus_per_node=2", "algorithm.kl_coef=0.1"],
            "got 1 beside one for the reference model (algorithm.kl_coef) of the 2 GPUs",
        ),
        (
            ["trainer.num_gpus=4", "monarch.gpus_per_node=4", "monarch.roles.policy={gpus: 1}"],
            "at most the 4 GPUs of num_nodes x gpus_per_node, got 5",
        ),
    ],
)
def test_what_cannot_be_shared_out_is_refused(tmp_path: Path, overrides: list[str], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, *overrides)
    assert told in str(caught.value)
