"""`trainer.num_gpus` and the role table."""

from pathlib import Path

import pytest

from rl_bridge.config import Config, load_config, save_config
from rl_bridge.errors import ConfigError

UNSET = "env: {app: 'a:b'}\nrollout: {task: 'c:D'}\n"
FILE = "env: {app: 'a:b'}\nrollout: {task: 'c:D', num_workers: 14}\n"


@pytest.fixture(autouse=True)
def _no_gpus_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def loaded(tmp_path: Path, *overrides: str, text: str = FILE) -> Config:
    file = tmp_path / "run.yaml"
    file.write_text(text)
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


CPU = {
    "model.dtype": "float32",
    "trainer.activation_checkpointing": "none",
    "monarch.roles.policy.replicas": 1,
    "rollout.num_workers": 1,
    "env.sessions": 128,
    "evaluation.episodes": 10_000,
}
SIX_OF_EIGHT = {
    "model.dtype": "bfloat16",
    "trainer.activation_checkpointing": "full",
    "monarch.roles.policy.replicas": 6,
    "rollout.num_workers": 6,
    "env.sessions": 512,  # one batch, of 1,536 that the generators could work on
    "evaluation.episodes": 500,
}
EIGHT = ("trainer.num_gpus=2", "monarch.gpus_per_node=8")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], CPU),
        (["trainer.num_gpus=0", "monarch.gpus_per_node=8"], CPU),
        (EIGHT, SIX_OF_EIGHT),
        ([*EIGHT, "rollout.max_num_seqs=64"], SIX_OF_EIGHT | {"env.sessions": 384}),
        ([*EIGHT, "rollout.max_staleness=1"], SIX_OF_EIGHT | {"env.sessions": 1024}),
        (
            [*EIGHT, "algorithm.kl_coef=0.1"],
            SIX_OF_EIGHT | {"monarch.roles.policy.replicas": 5, "rollout.num_workers": 5},
        ),
        # What somebody has set stays, be it the default elsewhere.
        (
            [*EIGHT, *(f"{key}={value}" for key, value in CPU.items() if "roles" not in key)],
            CPU,
        ),
        ([*EIGHT, "model.dtype=auto"], SIX_OF_EIGHT),
        # Generators alone, as an evaluation has them: no trainer that keeps activations.
        (
            ["monarch.roles.policy={replicas: 6, gpus: 1}"],
            SIX_OF_EIGHT | {"trainer.activation_checkpointing": "none"},
        ),
        (
            ["monarch.roles.trainer={gpus: 1}"],
            CPU | {"model.dtype": "bfloat16", "trainer.activation_checkpointing": "full"},
        ),
    ],
)
def test_what_is_left_open_is_decided_by_the_gpus(
    tmp_path: Path, overrides: list[str], expected: dict[str, object]
) -> None:
    config = loaded(tmp_path, *overrides, text=UNSET)
    assert config.decided_by_gpus() == expected
    # A saved run has it in words: it goes on so, wherever that is.
    save_config(config, tmp_path)
    assert load_config(tmp_path / "config.yaml") == config


def test_sessions_are_shared_out_to_several_environments(tmp_path: Path) -> None:
    text = "env: {one: {app: 'a:b'}, two: {app: 'a:c'}, three: {app: 'a:d', sessions: 7}}\nrollout: {task: 'c:D'}\n"
    config = loaded(tmp_path, *EIGHT, text=text)
    assert {name: env.sessions for name, env in config.environments.items()} == {
        "one": 170,
        "two": 170,
        "three": 7,
    }


@pytest.mark.parametrize(("here", "replicas"), [("0,1,2,3", 2), ("0,1", 1), ("", 1)])
def test_gpus_that_nobody_has_counted_are_those_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: str, replicas: int
) -> None:
    """With too few it is a plan for another machine."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", here)
    config = loaded(tmp_path, "trainer.num_gpus=2", text=UNSET)
    assert config.monarch.roles.policy.replicas == config.rollout.num_workers == replicas
    elsewhere = loaded(tmp_path, "trainer.num_gpus=2", "monarch.job=a:b", text=UNSET)
    assert elsewhere.monarch.roles.policy.replicas == 1
