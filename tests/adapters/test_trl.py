"""TRL's own GRPOTrainer trains a tiny random model on served environments."""

import inspect
import math
import pickle
import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from byte_pairs import save_byte_pairs
from serve_process import serve

from openenv_core.adapters.trl import TRLEnvironments, environment_reward

pytestmark = pytest.mark.heavy

PAGE = Path(__file__).parents[2] / "docs" / "trainers.md"

STAND = '<tool_call>\n{"name": "act", "arguments": {"action": "stand"}}\n</tool_call>'
ANSWERS = [STAND, STAND.replace("stand", "hit")]


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """A model that knows three answers, each a token: hit, stand, and nothing."""
    import torch
    import trl
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("tokenizer")
    template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
    specials = ["<|im_end|>", "<|im_start|>", "<|endoftext|>"]
    save_byte_pairs(folder, template, special=specials, plain=ANSWERS)
    tokenizer = AutoTokenizer.from_pretrained(folder, pad_token="<|endoftext|>")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    answer_ids = {tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids(ANSWERS)}
    model.generation_config.suppress_tokens = sorted(set(range(len(tokenizer))) - answer_ids)
    return model, tokenizer


def config(folder: Path, **options: Any) -> Any:
    from trl.trainer.grpo_config import GRPOConfig

    return GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=8,
        max_completion_length=options.pop("max_completion_length", 64),
        max_tool_calling_iterations=4,
        report_to=[],
        use_cpu=True,
        bf16=False,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        **options,
    )


def test_the_page_example_trains_and_leaves_nothing_running(
    policy: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import trl

    before = {name: weight.clone() for name, weight in policy[0].named_parameters()}
    others = set(psutil.Process().children(recursive=True))  # of tests that share this process
    servers: set[psutil.Process] = set()
    trainers: list[Any] = []

    def tiny_trainer(model: str, **options: Any) -> Any:
        trainers.append(GRPOTrainer(model=policy[0], processing_class=policy[1], **options))
        servers.update(set(psutil.Process().children(recursive=True)) - others)
        return trainers[0]

    GRPOTrainer = trl.GRPOTrainer  # noqa: N806 - a class
    monkeypatch.setattr(trl, "GRPOTrainer", tiny_trainer)
    monkeypatch.setattr(trl, "GRPOConfig", lambda _folder, **options: config(tmp_path, **options))
    exec(re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)[0], {})
    assert servers
    (trainer,) = trainers
    logged = [row for row in trainer.state.log_history if "reward" in row]
    assert len(logged) == 3
    assert any(row["tools/call_frequency"] > 0 for row in logged)
    assert any(not weight.equal(before[name]) for name, weight in policy[0].named_parameters())
    assert not [
        server for server in servers if server.is_running() and server.status() != psutil.STATUS_ZOMBIE
    ]


def test_server_killed_amid_hands_gives_no_reward(policy: tuple[Any, Any], tmp_path: Path) -> None:
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    order = tmp_path / "order"
    rewards: list[tuple[float | None, bool]] = []

    class KillInTheSecondStep(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, _arguments: Any, state: Any, _control: Any, **_: Any) -> None:
            if state.global_step == 1:
                order.touch()

    def watched(environments: Any, **_: Any) -> list[float | None]:
        found = environment_reward(environments)
        rewards.extend(
            (reward, one._episode.failure is None) for reward, one in zip(found, environments, strict=True)
        )
        return found

    with serve("--workers", "2", app="mortal:app", MORTAL_ORDER=str(order)) as server:
        environments = TRLEnvironments(f"http://{server.address}", prompt="Play.", unfinished_reward=-1)
        trainer = GRPOTrainer(
            model=policy[0],
            processing_class=policy[1],
            train_dataset=environments.train_dataset,
            environment_factory=environments.environment_factory,
            reward_funcs=[watched],
            args=config(tmp_path, max_steps=3, num_generations=4),
            callbacks=[KillInTheSecondStep()],
        )
        trainer.train()
        environments.close()
    assert not order.exists(), "the server was not killed"
    assert {reward for reward, sound in rewards if not sound} == {None}
    assert all(reward in (-1, 0, 1) for reward, sound in rewards if sound)
    logged = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    assert len(logged) == 3
    assert all(math.isfinite(reward) for reward in logged)


def test_rollouts_keep_the_tokens_that_were_sampled_and_what_the_environment_gave(
    policy: tuple[Any, Any], tmp_path: Path
) -> None:
    from trl import GRPOTrainer

    played: list[dict[str, Any]] = []
    rewards: list[float | None] = []

    def rollout_func(prompts: Any, trainer: Any) -> dict[str, Any]:
        played.append(environments.rollout_func(prompts, trainer))
        return played[-1]

    def watched(**columns: Any) -> list[float | None]:
        rewards.extend(environment_reward(**columns))
        return rewards[-len(columns["prompts"]) :]

    targets = {"table": "blackjack", "other": "blackjack"}
    with TRLEnvironments(targets, prompt="Play.", unfinished_reward=-1) as environments:
        before = {name: weight.clone() for name, weight in policy[0].named_parameters()}
        trainer = GRPOTrainer(
            model=policy[0],
            processing_class=policy[1],
            train_dataset=environments.train_dataset,
            rollout_func=rollout_func,
            reward_funcs=[watched],
            args=config(tmp_path, max_steps=3, num_generations=4, max_completion_length=512),
        )
        trainer.train()
        assert any(not weight.equal(before[name]) for name, weight in policy[0].named_parameters())
        assert len(rewards) == 24
        assert {reward for batch in played for reward in batch["environment_reward"]} <= {-1.0, 0.0, 1.0}
        assert rewards == [reward for batch in played for reward in batch["environment_reward"]]
        tokenizer = policy[1]
        answers = {tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids(ANSWERS)}
        longest = 0
        for batch in played:
            # Siblings are asked about the same hand.
            assert all(
                batch["prompt_ids"][place] == batch["prompt_ids"][place // 4 * 4] for place in range(8)
            )
            assert "You hold" in tokenizer.decode(batch["prompt_ids"][0])
            assert '"name": "act"' in tokenizer.decode(batch["prompt_ids"][0])
            for ids, mask in zip(batch["completion_ids"], batch["env_mask"], strict=True):
                assert len(ids) == len(mask) <= 512
                sampled = [token for token, own in zip(ids, mask, strict=True) if own]
                assert set(sampled) <= answers
                prompt_text = tokenizer.decode(
                    [token for token, own in zip(ids, mask, strict=True) if not own]
                )
                longest = max(longest, prompt_text.count("<|im_start|>user"))
                assert prompt_text.count("<|im_start|>user") == prompt_text.count("<|im_start|>assistant")
        assert longest, "no hand had a second answer"


def test_the_example_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["trl_blackjack.py", "1"])
    shown = runpy.run_module("examples.trl_blackjack", run_name="__main__")
    (row,) = (row for row in shown["trainer"].state.log_history if "reward" in row)
    assert -1 <= row["reward"] <= 1
    assert shown["trainer"].state.global_step == 1


def test_a_roll_out_whose_server_is_lost_has_no_reward(policy: tuple[Any, Any], tmp_path: Path) -> None:
    with serve(app="envs.blackjack_env.server.app:app") as server:
        environments = TRLEnvironments(f"http://{server.address}", episodes=1, unfinished_reward=-1)
        trainer = SimpleNamespace(
            processing_class=policy[1],
            _tokenizer=policy[1],
            chat_template=None,
            chat_template_kwargs={},
            max_completion_length=512,
            max_tool_calling_iterations=None,
            use_vllm=True,
        )
        end = policy[1].eos_token_id

        def answer(contexts: list[list[int]], *_: Any) -> Any:
            server.process.kill()
            server.process.wait()
            tokens = [*policy[1].convert_tokens_to_ids(ANSWERS[:1]), end]
            return [tokens] * len(contexts), [[-0.5, -0.25]] * len(contexts)

        trainer._generate_single_turn = answer
        found = environments.rollout_func([environments.train_dataset[0]["prompt"]], trainer)
        assert (found["environment_reward"], found["env_mask"]) == ([None], [[1, 1]])
        assert found["logprobs"] == [[-0.5, -0.25]]
        environments.close()


def test_several_environments_are_told_apart_by_name_and_each_has_its_own_tools() -> None:
    with TRLEnvironments({"table": "blackjack", "shop": "shop"}, episodes=2) as environments:
        factories = environments.environment_factory
        assert isinstance(factories, dict)
        assert [row["environment"] for row in environments.train_dataset] == ["table", "shop"] * 2
        table, shop = factories["table"](), factories["shop"]()
        assert _public(table) == {"reset", "act"}
        assert "act" not in _public(shop)
        assert "reset" in _public(shop)
        from transformers.utils import get_json_schema

        schema = get_json_schema(table.act)["function"]
        assert schema["parameters"]["properties"]["action"]["enum"] == ["hit", "stand"]
        assert schema["parameters"]["required"] == ["action"]
        for name in _public(shop) - {"reset"}:
            assert get_json_schema(getattr(shop, name))["function"]["description"]
        # The asynchronous trainer sends the factory to a process of its own.
        again = pickle.loads(pickle.dumps(factories["table"]))()
        assert again.reset(seed=5, prompt="x") == table.reset(seed=5, prompt="y")


def test_siblings_are_reset_ahead_with_the_seed_of_their_row() -> None:
    with TRLEnvironments("blackjack") as environments:
        factory = environments.environment_factory
        assert callable(factory)
        members = [factory() for _ in range(8)]
        seeds = [*[1] * 4, *[2] * 4, *[3] * 4, *[4] * 4, *[5] * 2, *[6] * 6]
        seen = []
        for number, seed in enumerate(seeds):
            seen.append(members[number % 8].reset(seed=seed))
            if number % 8 == 7:
                environment_reward(members)
        assert seen == [factory().reset(seed=seed) for seed in seeds]


def _public(instance: Any) -> set[str]:
    """What TRL sees, by its own way of looking."""
    members = inspect.getmembers(type(instance), predicate=inspect.isfunction)
    return {name for name, _ in members if not name.startswith("_")}
