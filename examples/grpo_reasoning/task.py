"""Lists of words to reverse, as a task for a small chat model."""

import re
from collections.abc import Mapping
from functools import cached_property
from typing import Final

from rich.console import Console

from envs.reasoning_env import ReasoningAction, ReasoningEnv, ReasoningObservation
from examples.sft.report import write_report
from rl_bridge.rollout import EvaluationResult, Policy, Task
from rl_bridge.rollout.assignment import held_out_seeds
from rl_bridge.tokens.chat import ChatMessage

QUESTION: Final = (
    "Solve the following problem.\n\nProvide you answer as a comma-separated list of words with a space after the "
    "comma.\n\nReverse this list of words: {}\n"
)
"""How the data set asks."""

EXAMPLES: Final = (
    "green, apple",
    "of, seven, door",
    "She, river",
    "window, into, blue",
    "be, Monday",
    "may, quiet, under",
    "stone, with",
    "go, history, Paris",
)
"""Lists that every prompt shows with their reversals, so that the format is known before training."""

PROBED_QUESTIONS: Final = 200
"""The number of held-out questions in a probe during training."""


def reverse(word_list: str) -> str:
    """Return a comma-separated list in the opposite order."""
    return ", ".join(reversed(word_list.split(", ")))


class ReversalTask(Task):
    """A task whose answer is a list of words. Its examples come first, so that all prompts share them."""

    client_type = ReasoningEnv

    def messages(self, observation: ReasoningObservation) -> list[ChatMessage]:
        """Return the examples and the question as a chat."""
        chat: list[ChatMessage] = [{"role": "system", "content": "Reverse the list of words."}]
        for words in EXAMPLES:
            chat.append({"role": "user", "content": QUESTION.format(words)})
            chat.append({"role": "assistant", "content": reverse(words)})
        return [*chat, {"role": "user", "content": observation.question or ""}]

    def parse(self, text: str) -> ReasoningAction | None:
        """Return the words of the first line, after a colon if it has one, however they are separated."""
        words = re.findall(r"\w+", text.strip().partition("\n")[0].rpartition(":")[2])
        return ReasoningAction(answer=", ".join(words)) if words else None

    async def probe(self, policy: Policy) -> Mapping[str, float]:
        """Return the greedy policy's share of exact answers to the first held-out questions."""
        asked = self._held_out[:PROBED_QUESTIONS]
        answers = [
            self.parse(text)
            for text in await policy.answer_greedily([self.messages(question) for question, _ in asked])
        ]
        exact = sum(
            answer is not None and answer.answer == correct
            for answer, (_, correct) in zip(answers, asked, strict=True)
        )
        return {"held_out_exact": exact / len(asked)}

    async def report(self, policy: Policy, result: EvaluationResult) -> None:
        """Print and write the share of held-out questions answered exactly, and the best constant answer's."""
        answers = [correct for _, correct in self._held_out]
        best = max(set(answers), key=lambda answer: (answers.count(answer), answer))
        share = answers.count(best) / len(answers)
        constant = {"answer": best, "success": share, "distinct_answers": len(set(answers))}
        write_report(self.folder, result, {"best_constant": constant})
        Console().print(
            f"best constant answer, {best!r}: {share:.1%} of {len(answers)} questions "
            f"with {len(set(answers))} answers",
            highlight=False,
        )

    @cached_property
    def _held_out(self) -> list[tuple[ReasoningObservation, str]]:
        """The held-out questions and their answers."""
        # Only the controller needs the data sets.
        from examples.grpo_reasoning.world import SplitEnvironment

        world, held_out = SplitEnvironment(), []
        for seed in held_out_seeds(0, self.config.evaluation.episodes):
            question = world.reset(seed=seed, **self.config.environment.reset)
            held_out.append((question, str(world.step(ReasoningAction(answer="")).correct_answer)))
        return held_out
