"""Questions about who does what, as a task for a small chat model."""

import json
import re
from collections import Counter
from typing import Final

from rich.console import Console

from envs.reasoning_env import ReasoningAction, ReasoningEnv, ReasoningObservation
from examples.sft.report import write_report
from rl_bridge.rollout import EvaluationResult, Policy, Task
from rl_bridge.rollout.assignment import held_out_seeds
from rl_bridge.tokens.chat import ChatMessage

EXAMPLES: Final = (
    (
        "Anna likes pasta. Boris hates running. Carla owns a red bicycle. \n"
        "Who hates running? Reply only with a name.",
        "Boris",
    ),
    (
        "Dora enjoys the rain. Emil fears spiders. Fatima loves chess. \n"
        "Who loves chess? Reply only with a name.",
        "Fatima",
    ),
)
"""Questions and answers that every prompt begins with, so that the format is known before training."""


class NeedleTask(Task):
    """A task whose answer is a name in the question."""

    client_type = ReasoningEnv

    def messages(self, observation: ReasoningObservation) -> list[ChatMessage]:
        """Return the examples and the question as a chat."""
        chat: list[ChatMessage] = [{"role": "system", "content": "Answer with the name."}]
        for question, answer in EXAMPLES:
            chat += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return [*chat, {"role": "user", "content": observation.question or ""}]

    def parse(self, text: str) -> ReasoningAction | None:
        """Return the last capitalised word of the first line, None if there is none."""
        words = re.findall(r"[A-Z][\w'-]*", text.strip().partition("\n")[0])
        return ReasoningAction(answer=words[-1]) if words else None

    async def report(self, policy: Policy, result: EvaluationResult) -> None:
        """Print and write the share of held-out questions answered correctly, and the best constant answer's."""
        write_report(self.folder, result)
        answers = self.held_out_answers()
        best, count = answers.most_common(1)[0]
        total = answers.total()
        constant = {"answer": best, "success": count / total, "distinct_answers": len(answers)}
        path = self.folder / "report.json"
        report = json.loads(path.read_text(encoding="utf-8")) | {"best_constant": constant}
        path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        Console().print(
            f"best constant answer, {best!r}: {count / total:.1%} of {total} questions with {len(answers)} answers",
            highlight=False,
        )

    def held_out_answers(self) -> Counter[str]:
        """Count the correct answers of the held-out questions."""
        # Only the controller, at the end, needs the data sets.
        from examples.grpo_reasoning.world import SplitEnvironment

        world, answers = SplitEnvironment(), Counter[str]()
        for seed in held_out_seeds(0, self.config.evaluation.episodes):
            world.reset(seed=seed, **self.config.environment.reset)
            answers[str(world.step(ReasoningAction(answer="")).correct_answer)] += 1
        return answers
