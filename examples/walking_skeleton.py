"""The smallest complete training loop: `python -m examples.walking_skeleton`.

An environment behind a WebSocket, one token from vLLM, one optimizer step, the new weights back into vLLM, and another
episode with them.
"""

import asyncio
import tempfile
from pathlib import Path

from envs.blackjack_env import BlackjackAction, BlackjackEnv
from examples.grpo_blackjack import chat
from rl_bridge.buffer.batch import TrainBatch
from rl_bridge.config import Config, RolloutConfig, TrainerConfig
from rl_bridge.generator.actor import PolicyActor
from rl_bridge.generator.vllm_api import ONE_THREAD
from rl_bridge.services.fleet import Fleet
from rl_bridge.tiny_policy import make_tiny_policy
from rl_bridge.tokens.chat import ChatTokenizer
from rl_bridge.tokens.conversation import training_rows
from rl_bridge.trainer.actor import TrainerActor
from rl_bridge.trainer.settings import TrainerSettings
from rl_bridge.types import Ending, SamplingSettings, Trajectory, Turn
from rl_bridge.weights import WeightStore

ONE_TOKEN = SamplingSettings(temperature=1.0, max_new_tokens=1)
CONFIG = Config(
    rollout=RolloutConfig(max_length=32, max_num_seqs=8, kv_cache_mb=64),
    trainer=TrainerConfig(iterations=1, learning_rate=1e-2, checkpoint_interval=0),
)


async def main() -> None:
    """Play an episode, train one step, synchronise the weights, play another episode."""
    with tempfile.TemporaryDirectory() as folder:
        policy = make_tiny_policy(Path(folder) / "policy", chat.render_prompts(), seed=0)
        tokenizer = ChatTokenizer(policy)
        async with Fleet(Path(folder) / "logs"), await BlackjackEnv.from_process() as env:
            store = WeightStore.create()
            generator = await PolicyActor.as_service(CONFIG, policy, store)
            trainer = await TrainerActor.options(environment=ONE_THREAD).as_service(
                TrainerSettings(config=CONFIG, model_path=str(policy), folder=folder, max_loss_tokens=1),
                store,
            )

            async def episode(seed: int) -> Trajectory:
                """Deal a hand, generate one token, and play it as the action (stand if it is none)."""
                table = (await env.reset(seed=seed)).observation
                prompt = tokenizer.prompt(
                    chat.prompt(table.player_total, table.usable_ace, table.dealer_card)
                )
                answer = await generator.generate.route(prompt, ONE_TOKEN)
                word = chat.parse(tokenizer.text(answer.tokens))
                result = await env.step(BlackjackAction(action=word or "stand"))
                reward = float(result.reward or 0.0) if word else -1.0
                print(
                    f"weights {answer.version}: {table.text} {word or 'an illegal answer'}: reward {reward:+}"
                )
                turn = Turn(prompt=prompt, completion=answer)
                return Trajectory(seed=seed, turns=[turn], ending=Ending.COMPLETED, reward=reward)

            first = await episode(seed=1)
            batch = TrainBatch.from_samples(training_rows(first, advantage=first.reward, index=0))
            metrics = await trainer.train_step.route(batch)
            print(
                f"one step: gradient norm {metrics['train/grad_norm']:.3f}; engine and trainer differ by "
                f"{metrics['mismatch/logprob_max']:.1e} in the token's log-probability"
            )

            await trainer.push_weights.route(1)
            await generator.update_weights.fanout(1)
            second = await episode(seed=2)
            assert (first.version, second.version) == (0, 1)


if __name__ == "__main__":
    asyncio.run(main())
