"""BlackJack as a task for a language model: prompts, parsing, evaluation."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from envs.blackjack_env import BlackjackAction, BlackjackEnv, BlackjackObservation
from envs.blackjack_env.oracle import DECISION_STATES, Answer, DecisionState, Rules, agreement, evaluate
from envs.blackjack_env.table import observe_decision
from examples.grpo_blackjack import chat
from examples.grpo_blackjack.report import answer_rates, write_report
from rl_bridge.errors import ConfigError
from rl_bridge.rollout import EvaluationResult, Policy, Task
from rl_bridge.tiny_policy import make_tiny_policy
from rl_bridge.tokens.chat import ChatMessage
from rl_bridge.types import Trajectory

# The client only encodes actions, so two of them serve every hand.
_ACTIONS = {"hit": BlackjackAction(action="hit"), "stand": BlackjackAction(action="stand")}


class BlackjackTask(Task):
    """A task whose answers are hit or stand, one per decision, for the tiny policy that it makes.

    Probe and report ask the policy through `messages` and `parse`, as rollouts do, so a subclass may override them.
    """

    client_type = BlackjackEnv

    def messages(self, observation: BlackjackObservation) -> list[ChatMessage]:
        """Return a prompt with total, usable ace and dealer's card, which determine the optimal action."""
        return chat.prompt(observation.player_total, observation.usable_ace, observation.dealer_card)

    def parse(self, text: str) -> BlackjackAction | None:
        """Return the action of an answer, None if it is illegal; see `chat.parse`."""
        word = chat.parse(text)
        return None if word is None else _ACTIONS[word]

    def make_policy(self) -> Path:
        """Make a tiny policy of Qwen3's architecture with random weights, determined by the run's seed."""
        return make_tiny_policy(self.folder / "initial_policy", chat.render_prompts(), seed=self.config.seed)

    def metrics(self, trajectories: Sequence[Trajectory]) -> Mapping[str, float]:
        """Return the share of hands won while exploring."""
        return {"blackjack/win_rate": sum(t.reward > 0 for t in trajectories) / len(trajectories)}

    async def probe(self, policy: Policy) -> Mapping[str, float]:
        """Return the exact return of the greedy policy, and shares of its answers to all observations.

        The shares are those of optimal answers (`agreement`), of legal ones, and of each action.
        """
        answers = await self._greedy(policy)
        exact = evaluate(answers, rules=self._rules(), illegal_return=self.config.reward.illegal_answer)
        return {
            "exact_return": exact.mean_return,
            "agreement": agreement(answers).unweighted,
            **answer_rates(answers),
        }

    async def report(self, policy: Policy, result: EvaluationResult) -> None:
        """Print and write the report; see `report.write_report`."""
        write_report(
            self.folder,
            answers=await self._greedy(policy),
            result=result,
            config=self.config,
            rules=self._rules(),
        )

    def _rules(self) -> Rules:
        reset = self.config.environment.reset
        return Rules(natural=bool(reset.get("natural")), sab=bool(reset.get("sab")))

    async def _greedy(self, policy: Policy) -> Mapping[DecisionState, Answer]:
        chats = [self.messages(observe_decision(state)) for state in DECISION_STATES]
        answer_texts = await policy.answer_greedily(chats)
        return dict(zip(DECISION_STATES, map(self._answer, answer_texts), strict=True))

    def _answer(self, text: str) -> Answer:
        try:
            action = self.parse(text)
        except (ValueError, LookupError):  # which end an episode too
            return None
        return None if action is None else action.action


class BlackjackChatTask(BlackjackTask):
    """The same for checkpoints that were trained to chat, which answer in one word after worked examples."""

    def messages(self, observation: BlackjackObservation) -> list[ChatMessage]:
        """Return a chat with worked examples, then the decision; see `chat.prompt_with_examples`."""
        return chat.prompt_with_examples(
            observation.player_total, observation.usable_ace, observation.dealer_card
        )

    def make_policy(self) -> Path:
        """Refuse: the prompt is for published checkpoints."""
        raise ConfigError(
            "expected model.path, the folder of a checkpoint with a chat template, got none; "
            "`./scripts/published-model` fetches one and prints its folder"
        )
