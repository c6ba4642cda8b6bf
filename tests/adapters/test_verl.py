"""verl's own agent loop plays a served environment. In whatever installation has verl: it pins other transformers."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from counter import fragile_app
from serving import serving

from openenv_core.errors import EnvironmentFailureError

pytest.importorskip("verl", reason="needs verl 0.9")
pytestmark = pytest.mark.soak

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    letters = [*specials, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    words.add_special_tokens(specials)
    made = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    made.chat_template = TEMPLATE
    return made


class Policy:
    """verl's client of the engine, with answers that are known before."""

    def __init__(self, words: Any, *answers: str) -> None:
        self._words = words
        self._left = iter(answers)
        self.prompts: list[str] = []

    async def generate(self, *, request_id: str, prompt_ids: list[int], sampling_params: Any) -> Any:
        self.prompts.append(self._words.decode(prompt_ids))
        ids = [*self._words.encode(next(self._left)), self._words.eos_token_id]
        return SimpleNamespace(token_ids=ids, log_probs=[-0.5] * len(ids))


async def play(address: str, *answers: str, length: int = 4096, **options: Any) -> tuple[Any, list[str], Any]:
    from omegaconf import OmegaConf
    from verl.experimental.agent_loop.agent_loop import DictConfigWrap

    from openenv_core.adapters.verl import ServedAgentLoop

    words = tokenizer()
    policy = Policy(words, *answers)
    rollout = {"prompt_length": 4096, "response_length": length}
    loop = ServedAgentLoop(
        trainer_config=DictConfigWrap(OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}})),
        server_manager=policy,
        tokenizer=words,
        processor=None,
        dataset_cls=None,
        data_config=DictConfigWrap(OmegaConf.create({})),
        base_url=f"http://{address}",
        **options,
    )
    row = {"raw_prompt": [{"role": "system", "content": "Count."}], "extra_info": {"reset": {"start": 2}}}
    return await loop.run({}, **row), policy.prompts, words


def act(amount: int) -> str:
    return f"<tool_call>{json.dumps({'name': 'act', 'arguments': {'amount': amount}})}</tool_call>"


async def test_the_policys_tokens_alone_are_trained_on() -> None:
    async with serving(fragile_app) as address:
        output, prompts, words = await play(address, "Hm.", act(3))
        assert "Count." in prompts[0]
        assert '"total": 2' in prompts[0]
        assert prompts[1].startswith(prompts[0] + "Hm.<|im_end|>")
        ids, mask = output.response_ids, output.response_mask
        own = words.decode([token for token, trained in zip(ids, mask, strict=True) if trained])
        assert own.replace("\n", "") == f"Hm.<|im_end|>{act(3)}<|im_end|>"
        untrained_text = words.decode(
            [token for token, trained in zip(ids, mask, strict=True) if not trained]
        )
        assert "there is no call of a tool in the answer" in untrained_text
        assert len(output.response_logprobs) == len(ids)
        assert (output.reward_score, output.num_turns) == (3.0, 4)
        assert words.decode([*output.prompt_ids, *ids]).startswith(prompts[1])


async def test_limits_end_an_episode_and_a_failure_beside_the_policy_raises() -> None:
    async with serving(fragile_app) as address:
        output, prompts, _ = await play(address, "a", "b", max_turns=2, unfinished_reward=-1.0)
        assert (output.reward_score, len(prompts)) == (-1.0, 2)
        output, _, _ = await play(address, "a" * 50, length=20, unfinished_reward=-1.0)
        assert (output.reward_score, len(output.response_ids), len(output.response_mask)) == (-1.0, 20, 20)
        with pytest.raises(EnvironmentFailureError, match="no disk"):
            await play(address, act(7))
