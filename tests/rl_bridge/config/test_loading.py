"""YAML and overrides into a configuration, and the errors of invalid ones."""

import errno
import os
from operator import attrgetter
from pathlib import Path

import pytest
import yaml

from rl_bridge.config import (
    CONFIG_FILE,
    Config,
    load_config,
    load_saved_config,
    require_trainable,
    resolve,
    save_config,
)
from rl_bridge.config.effects import find_unused_keys
from rl_bridge.config.schema import TOOL_WORLD_TASK
from rl_bridge.errors import ConfigError
from rl_bridge.rollout import Task

MINIMAL = """
env: {app: "package.app:app"}
rollout: {task: "package.task:Task", batch_size: 64, group_size: 8}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL)
    return path


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("algorithm.kl_coef", "0.02", 0.02),
        ("algorithm.normalize_std", "false", False),
        ("model.path", "null", None),
        ("trainer.learning_rate", "1e-6", 1e-6),
        ("trainer.betas", "[0.8, 0.99]", (0.8, 0.99)),
        ("env.reset", "{natural: true}", {"natural": True}),
    ],
)
def test_overrides_are_read_as_yaml(file: Path, key: str, text: str, expected: object) -> None:
    value = attrgetter(key)(load_config(file, [f"{key}={text}"]))
    assert (value, type(value)) == (expected, type(expected))


def test_every_fault_is_listed(file: Path) -> None:
    faults = {
        "algorithm.kl_coeff=1": "unknown key; did you mean 'algorithm.kl_coef'?",
        "trainr.learning_rate=1": "",
        "trainer.learning_rate=fast": "",
        "seed=-1": "",
        "model.dtype=float8": "Input should be 'auto', 'float32' or 'bfloat16', got 'float8'",
        "rollout.batch_size=null": "",
        "evaluation.episodes=.nan": "",
    }
    message = refusal(file, *faults)
    for override, fault in faults.items():
        key = override.partition("=")[0].replace("trainr.learning_rate", "trainr")
        assert f"\n  {key}: {fault}" in message
    assert "did you mean 'trainer'?" in message


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.source=prompts.jsonl"], "expected one of env (an environment to play"),
        (
            ["env=null", "rollout.task=null", "data.source=a.jsonl"],
            "expected reward.function or reward.model",
        ),
        (["reward.function=a.b", "reward.model=/m"], "expected reward.function or reward.model, got both"),
        (["env.image=x"], "expected exactly one of env.app"),
        (["env.app=null"], "exactly one of env.app"),
        (["rollout.batch_size=63"], "multiple of rollout.group_size, got 63 and 8"),
        (["rollout.max_length=16", "rollout.max_new_tokens=16"], "max_new_tokens below rollout.max_length"),
        (["deterministic=true", "rollout.max_staleness=1"], "rollout.max_staleness of 0 with deterministic"),
        (["monarch.roles.trainer.replicas=2"], "more ranks are monarch.roles.trainer.procs"),
        (["monarch.roles.policy.gpus=2"], "0 or generator.tensor_parallel, 1, got 2"),
        (["monarch.roles.environment.gpus=1"], "on one host without GPUs"),
        (["monarch.gpus_per_node=1", "monarch.roles.policy={replicas: 2, gpus: 1}"], "at most the 1 GPUs"),
        (["monarch.workers=[tcp://a:1]", "monarch.transport=cuda_ipc"], "with monarch.transport=cuda_ipc"),
        (["monarch.workers=[tcp://a:1]", "monarch.job=a:b"], "monarch.workers or monarch.job, got both"),
        (["rollout.num_workers={min: 1, max: 2}"], "monarch.join_port with replicas as {min, max}"),
        (
            ["monarch.join_port=1", "monarch.roles.policy.replicas={min: 3, max: 2}"],
            "min of at most max, got 3 and 2",
        ),
        (
            ["monarch.roles.environment.replicas={max: 2}"],
            "monarch.roles.environment.replicas to be a number",
        ),
        (["monarch.roles.trainer.replicas={max: 2}"], "monarch.roles.trainer.replicas of 1"),
        (["monarch.join_port=1", "monarch.transport=cuda_ipc"], "no monarch.workers, job or join_port with"),
        (
            [
                *("monarch.join_port=1", "monarch.colocate=true", "monarch.gpus_per_node=1"),
                *("monarch.roles={policy: {gpus: 1}, trainer: {gpus: 1}}",),
            ],
            "no monarch.join_port with monarch.colocate",
        ),
        (["trainer.tensor_parallel=2"], "to be the trainer's ranks"),
        (["trainer.parallel={fsdp: 2}"], "got 1 x 2 x 1 and 1; change trainer.parallel, or"),
        (
            ["trainer.parallel.ep=2"],
            "expected trainer.parallel.ep to divide fsdp x tp of the trainer, got 2 and 1",
        ),
        (
            ["trainer.parallel.tp=2", "monarch.roles={trainer: {procs: 4}, reference: {procs: 3}}"],
            "to be the reference's ranks, got 1 x any x 2 and 3",
        ),
        (["trainer.parallel.cp=2"], "a row stays on one rank"),
        (["trainer.parallel.pp=2"], "there are no pipelines"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(file: Path, overrides: list[str], message: str) -> None:
    assert message in refusal(file, *overrides)


def test_tensor_parallel_is_short_for_a_key_of_parallel(file: Path) -> None:
    words = ["trainer.num_gpus=4", "trainer.parallel={tp: 4, hsdp: 1}"]
    assert load_config(file, [*words, "trainer.tensor_parallel=2"]).trainer.parallel.tp == 2
    data = {**yaml.safe_load(file.read_text()), "trainer": {"num_gpus": 2, "tensor_parallel": 2}}
    file.write_text(yaml.safe_dump(data))
    assert load_config(file).trainer.parallel.tp == 2
    assert load_config(file, ["trainer.parallel.tp=1"]).trainer.parallel.tp == 1


def test_roles_that_grow_start_with_the_least(file: Path) -> None:
    words = ["monarch.join_port=29502", "rollout.num_workers={min: 2, max: 5}"]
    config = load_config(file, [*words, "monarch.roles.policy.replicas={max: 3}"])
    policy = config.monarch.roles.policy
    assert (config.rollout.min_workers, policy.min_replicas, policy.max_replicas) == (2, 1, 3)
    assert not config.monarch.is_local, "weights have to reach hosts that join"


def test_an_environment_without_a_task_is_a_world_of_tools(file: Path) -> None:
    config = load_config(file, ["rollout.task=null"])
    assert config.rollout.task == TOOL_WORLD_TASK
    assert issubclass(resolve(TOOL_WORLD_TASK, key="rollout.task"), Task)


@pytest.mark.parametrize(
    "override",
    [
        "trainer.learning_rate=0",
        "trainer.learning_rate=.inf",
        "trainer.timeout_s=1e10",
        "rollout.max_staleness=1000000",
        "rollout.group_size=1",
        "rollout.max_staleness=-1",
        "trainer.betas=[0.9, 1.0]",
        "reward.illegal_answer=.nan",
        "seed=2147483648",
        "name=../elsewhere",
    ],
)
def test_values_that_make_no_sense_are_refused(file: Path, override: str) -> None:
    assert override.partition("=")[0] in refusal(file, override)


@pytest.mark.parametrize("override", ["seed", ".seed=1", "seed.deeper=1", "seed=[1", "name=2026-02-30"])
def test_malformed_override_is_refused(file: Path, override: str) -> None:
    file.write_text(MINIMAL + "seed: 3\n")
    assert repr(override) in refusal(file, override)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"env: [1, 2\n", "not valid YAML"),
        (b"a: !!python/object:os.system {}\n", "not valid YAML"),
        (b"name: 2026-02-30\n", "not valid YAML: day is out of range for month"),
        (b"[" * 5000, "not valid YAML"),
        (b"", "expected a mapping of sections"),
        (b"rollout: {}\ntrainer: {iterations: 5}\nrollout: {}\n", "the key 'rollout' is there twice"),
        (b"rollout: {num_turns: 3, num_turns: 4}\n", "the key 'num_turns' is there twice"),
    ],
    ids=["unclosed", "object", "no such day", "deep", "empty", "twice", "twice within"],
)
def test_files_that_are_no_configuration(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    assert expected in refusal(path)


def test_a_mapping_that_takes_over_another_may_change_it(file: Path) -> None:
    file.write_text(
        "env: {app: 'a:b', reset: &usual {natural: true, decks: 1}}\n"
        "rollout: {task: 'c:D'}\n"
        "monarch: {roles: {coder: {<<: {app: 'x:y', replicas: 2}, replicas: 3}}}\n"
    )
    coder = load_config(file).monarch.roles.coder
    assert coder is not None
    assert (coder.app, coder.replicas) == ("x:y", 3)


def test_saved_configuration_loads_unchanged(file: Path, tmp_path: Path) -> None:
    config = load_config(file, ["trainer.betas=[0.5, 0.6]", "env.reset.sab=true"])
    save_config(config, tmp_path)
    assert load_config(tmp_path / CONFIG_FILE) == config
    assert set(yaml.safe_load((tmp_path / CONFIG_FILE).read_text())) == set(Config.model_fields)


@pytest.mark.parametrize("env", ["{app: 'a:b'}", "{cards: {app: 'a:b', weight: 2}}"])
def test_saved_configuration_of_an_earlier_version_loads_unless_a_key_that_was_set_is_gone(
    file: Path, tmp_path: Path, env: str
) -> None:
    config = load_config(file, [f"env={env}", "trainer.betas=[0.5, 0.6]"])
    save_config(config, tmp_path)
    saved = yaml.safe_load((tmp_path / CONFIG_FILE).read_text())
    for section in (saved, saved["rollout"], saved["algorithm"], saved["env"].get("cards", saved["env"])):
        section["gone"] = None  # as 0.1 before its release wrote rollout.fork_turn
    (tmp_path / CONFIG_FILE).write_text(yaml.safe_dump(saved))
    assert load_saved_config(tmp_path) == config
    assert load_saved_config(tmp_path, ["seed=9"]) == config.model_copy(update={"seed": 9})
    with pytest.raises(ConfigError, match=r"rollout\.gone: unknown key"):
        load_saved_config(tmp_path, ["rollout.gone=null"])
    saved["rollout"]["gone"] = 2
    (tmp_path / CONFIG_FILE).write_text(yaml.safe_dump(saved))
    with pytest.raises(ConfigError, match=r"rollout\.gone: unknown key"):
        load_saved_config(tmp_path)


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ("no_colon", "expected rollout.task as 'package.module:name', got 'no_colon'"),
        ("no_such_package.at_all:X", "rollout.task: cannot import 'no_such_package.at_all'"),
        ("rl_bridge.config:Confg", "has no 'Confg'; did you mean 'Config'?"),
    ],
)
def test_references_that_do_not_resolve(reference: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(reference, key="rollout.task")
    assert expected in str(caught.value)


def test_configuration_that_cannot_be_written_leaves_the_one_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Config.model_validate({"env": {"app": "a:b"}, "rollout": {}, "seed": 1})
    save_config(before, tmp_path)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save_config(before.model_copy(update={"seed": 2}), tmp_path)
    assert load_config(tmp_path / CONFIG_FILE) == before
    assert [path.name for path in tmp_path.iterdir()] == [CONFIG_FILE]


SEVERAL = "env={cards: {app: 'a:b', weight: 3}, shop: {url: 'http://shop:1', task: 'c:D'}}"


def test_several_environments_are_keys_by_name(file: Path, tmp_path: Path) -> None:
    config = load_config(file, [SEVERAL, "env.shop.weight=2", "env.shop.reset.level=4", "model.path=/m"])
    assert {name: env.weight for name, env in config.environments.items()} == {"cards": 3.0, "shop": 2.0}
    shop = config.of("shop")
    assert (shop.environment.reset, shop.environment.urls) == ({"level": 4}, ("http://shop:1",))
    assert (shop.rollout.task, config.of("cards").rollout.task) == ("c:D", config.rollout.task)
    save_config(config, tmp_path)
    assert load_config(tmp_path / CONFIG_FILE) == config
    with pytest.raises(ValueError, match="a run on one environment, got 2"):
        _ = config.environment
    require_trainable(config)
    with pytest.raises(ConfigError, match=r"model\.path with several environments"):
        require_trainable(load_config(file, [SEVERAL, "model.path=null"]))
    with pytest.raises(ConfigError, match=r"env\.shop\.url: "):
        require_trainable(load_config(file, [SEVERAL, "env.shop.url=nowhere"]))
    alone = load_config(file)
    assert alone.environments == {"": alone.env}
    assert alone.of("") == alone
    assert "env.weight=2.0 has no effect" in find_unused_keys(load_config(file, ["env.weight=2"]))[0]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("env.shop.wieght=1", "env.shop.wieght: unknown key; did you mean 'env.shop.weight'?"),
        ("env.shop.weight=0", "env.shop.weight: Input should be greater than 0"),
        ("env.shop.app=a:b", "expected exactly one of env.app"),
        ("env.the-shop={app: 'a:b'}", "env.the-shop.[key]: String should match pattern"),
        ("env.sessions=4", "env.cards: unknown key"),
    ],
)
def test_faults_of_one_of_several_environments_name_it(file: Path, override: str, message: str) -> None:
    assert message in refusal(file, SEVERAL, override)


def test_seats_of_self_play_and_siblings_of_each(file: Path) -> None:
    assert load_config(file, ["env.seats=[a,b]"]).environment.seats == ("a", "b")
    assert "the names of two seats or more" in refusal(file, "env.seats=[a]")
    assert "the names of two seats or more" in refusal(file, "env.seats=[a,a]")
    assert "a multiple of the number of trained env.seats, 3" in refusal(file, "env.seats=[a,b,c]")
    few = refusal(file, "env.seats=[a,b]", "rollout.group_size=2")
    assert "at least two siblings of each seat, got 2" in few
    lone = ("env.seats={a: policy, b: frozen}", "rollout.group_size=2")
    assert load_config(file, lone).environment.players == {"a": "policy", "b": "frozen"}
    assert "2 with exchange_seats" in refusal(file, *lone, "env.exchange_seats=true")


def test_opponents_of_self_play(file: Path) -> None:
    frozen = "env.seats={a: policy, b: frozen}"
    assert load_config(file, [frozen]).opponent_source == "frozen"
    assert load_config(file, ["env.seats={a: policy, b: runs/x/policy}"]).opponent_source == "runs/x/policy"
    served = load_config(file, ["env.seats={a: policy, b: 'server:random', c: 'x:f'}"])
    assert (served.opponent_source, served.has_opponent) == (None, False)
    assert load_config(file, ["env.seats=[a,b]", "self_play.pool_interval=5"]).has_opponent
    assert not load_config(file, ["self_play.pool_interval=5"]).has_opponent
    assert "expected policy at one of env.seats" in refusal(file, "env.seats={a: frozen, b: frozen}")
    assert "['a'], got ['b']" in refusal(file, frozen, "env.trained_seats=[b]")
    assert "one opponent with weights" in refusal(file, "env.seats={a: policy, b: frozen, c: runs/x}")
    tables = "self_play.table_interval=5"
    assert load_config(file, [frozen, tables]).self_play.table_interval == 5
    assert "there is one at the end" in refusal(file, frozen, tables, "rollout.max_staleness=1")
