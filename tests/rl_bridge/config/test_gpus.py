"""`trainer.num_gpus` and the role table."""

from pathlib import Path

import pytest

from rl_bridge.config import Config, colocate_if_needed, load_config, save_config
from rl_bridge.errors import ConfigError

UNSET = "env: {app: 'a:b'}\nrollout: {task: 'c:D'}\n"
FILE = "env: {app: 'a:b'}\nrollout: {task: 'c:D', num_workers: 14}\n"


@pytest.fixture(autouse=True)
def _no_gpus_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def load(tmp_path: Path, *overrides: str, text: str = FILE) -> Config:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    return load_config(file, overrides)


def shape(config: Config) -> tuple[tuple[int, int, int], tuple[int, int], int]:
    """The trainer's processes a host, hosts and GPUs, the policy's replicas and GPUs of each, the reference's GPUs."""
    table = config.monarch.roles
    trainer, policy = table.trainer, table.policy
    return (trainer.procs, trainer.hosts, trainer.gpus), (policy.replicas, policy.gpus), table.reference.gpus


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("", ((1, 1, 0), (1, 0), 0)),
        ("trainer.num_gpus=0", ((1, 1, 0), (1, 0), 0)),
        ("trainer.num_gpus=2 algorithm.kl_coef=0.1 monarch.gpus_per_node=8", ((2, 1, 2), (5, 1), 1)),
        ("trainer.num_gpus=16 monarch.gpus_per_node=8 monarch.num_nodes=8", ((8, 2, 16), (14, 1), 0)),
        (
            "trainer.num_gpus=1 monarch.roles.policy.replicas=3 monarch.roles.trainer.gpus=1",
            ((1, 1, 1), (3, 0), 0),
        ),
        # Too few for both: they take turns.
        ("trainer.num_gpus=1 monarch.gpus_per_node=1", ((1, 1, 1), (1, 1), 0)),
        ("trainer.num_gpus=4 monarch.gpus_per_node=4 algorithm.kl_coef=0.1", ((4, 1, 4), (4, 1), 1)),
        ("trainer.num_gpus=2 monarch.gpus_per_node=8 monarch.colocate=true", ((2, 1, 2), (2, 1), 0)),
        ("trainer.num_gpus=1 monarch.gpus_per_node=8 generator.tensor_parallel=2", ((1, 1, 1), (3, 2), 0)),
        ("trainer.num_gpus=4 monarch.gpus_per_node=5 generator.tensor_parallel=2", ((4, 1, 4), (2, 2), 0)),
    ],
)
def test_unset_roles_follow_from_the_gpus(tmp_path: Path, overrides: str, expected: object) -> None:
    assert shape(load(tmp_path, *overrides.split())) == expected


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("trainer.num_gpus=2 monarch.roles.trainer.gpus=1", "as monarch.roles.trainer.gpus says, 1, got 2"),
        ("trainer.num_gpus=9 monarch.gpus_per_node=8 monarch.num_nodes=2", "fill each of its 2 hosts"),
        (
            "trainer.num_gpus=1 monarch.gpus_per_node=2 algorithm.kl_coef=0.1 monarch.colocate=false",
            "got 1 beside one for the reference model (algorithm.kl_coef) of the 2 GPUs",
        ),
        ("trainer.num_gpus=4 monarch.gpus_per_node=4 monarch.roles.policy.gpus=1", "at most the 4 GPUs"),
        ("trainer.num_gpus=2 monarch.colocate=true monarch.roles.policy.gpus=1", "2, got 1 with 1 each"),
        (
            "monarch.colocate=true rollout.max_staleness=1 rollout.weight_update=drain",
            "weight_update=continue with monarch.colocate and rollout.max_staleness of 1, got drain",
        ),
        (
            "monarch.colocate=true rollout.max_staleness=1 rollout.episode_timeout_s=60",
            "no rollout.episode_timeout_s with monarch.colocate",
        ),
    ],
)
def test_impossible_gpu_assignments_are_refused(tmp_path: Path, overrides: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, *overrides.split())
    assert message in str(caught.value)


def test_machine_with_too_few_gpus_for_both_has_them_take_turns(tmp_path: Path) -> None:
    unplanned = load(tmp_path, "trainer.num_gpus=1")  # of what machine nobody has said
    assert unplanned.monarch.gpus == 15
    alone = colocate_if_needed(unplanned, 1)
    assert (alone.monarch.colocate, alone.monarch.gpus, shape(alone)[1]) == (True, 1, (1, 1))
    assert colocate_if_needed(alone, 1) is alone  # a run that goes on
    for gpus in (0, 15):  # none, which no turn makes up for, and enough
        assert colocate_if_needed(unplanned, gpus) is unplanned
    refused = load(tmp_path, "trainer.num_gpus=1", "monarch.colocate=false")
    assert colocate_if_needed(refused, 1) is refused
    stale = ("trainer.num_gpus=1", "rollout.max_staleness=1")
    assert colocate_if_needed(load(tmp_path, *stale), 1).rollout.weight_update == "continue"
    with pytest.raises(ConfigError, match=r"weight_update=continue with monarch\.colocate"):
        colocate_if_needed(load(tmp_path, *stale, "rollout.weight_update=drain"), 1)


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
    "trainer.activation_checkpointing": "auto",
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
        ([*EIGHT, *(f"{key}={value}" for key, value in CPU.items() if "roles" not in key)], CPU),
        ([*EIGHT, "model.dtype=auto"], SIX_OF_EIGHT),
        ([*EIGHT, "trainer.activation_checkpointing=auto"], SIX_OF_EIGHT),
        (["trainer.activation_checkpointing=auto"], CPU),
        # Generators alone, as an evaluation has them: no trainer that keeps activations.
        (
            ["monarch.roles.policy={replicas: 6, gpus: 1}"],
            SIX_OF_EIGHT | {"trainer.activation_checkpointing": "none"},
        ),
        (
            ["monarch.roles.trainer={gpus: 1}"],
            CPU | {"model.dtype": "bfloat16", "trainer.activation_checkpointing": "auto"},
        ),
    ],
)
def test_unset_keys_are_decided_by_the_gpus(
    tmp_path: Path, overrides: list[str], expected: dict[str, object]
) -> None:
    config = load(tmp_path, *overrides, text=UNSET)
    assert config.decided_by_gpus() == expected
    # A saved run has it in words: it goes on so, wherever that is.
    save_config(config, tmp_path)
    assert load_config(tmp_path / "config.yaml") == config


def test_without_an_environment_its_keys_are_undecided(tmp_path: Path) -> None:
    preset = Path(__file__).parents[3] / "examples" / "presets" / "qwen3-8b.yaml"
    its_keys = {"rollout.num_workers": 4, "env.sessions": 256, "evaluation.episodes": 500}
    complete = load_config(preset, ["env.app=a:b"]).decided_by_gpus()
    assert complete.items() >= its_keys.items()
    undecided = load_config(preset).decided_by_gpus()
    assert undecided == {key: value for key, value in complete.items() if key not in its_keys}


def test_sessions_are_shared_out_to_several_environments(tmp_path: Path) -> None:
    text = "env: {one: {app: 'a:b'}, two: {app: 'a:c'}, three: {app: 'a:d', sessions: 7}}\nrollout: {task: 'c:D'}\n"
    config = load(tmp_path, *EIGHT, text=text)
    assert [env.sessions for env in config.environments.values()] == [170, 170, 7]


@pytest.mark.parametrize(("here", "replicas"), [("0,1,2,3", 2), ("0,1", 1), ("", 1)])
def test_uncounted_gpus_are_those_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: str, replicas: int
) -> None:
    """With too few it is a plan for another machine."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", here)
    config = load(tmp_path, "trainer.num_gpus=2", text=UNSET)
    assert config.monarch.roles.policy.replicas == config.rollout.num_workers == replicas
    elsewhere = load(tmp_path, "trainer.num_gpus=2", "monarch.job=a:b", text=UNSET)
    assert elsewhere.monarch.roles.policy.replicas == 1
