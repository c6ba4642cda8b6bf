"""Single-turn rollouts on a dataset: sample a prompt, generate answers, evaluate, report."""

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from rl_bridge.data.examples import Example
from rl_bridge.metrics.sinks import last_row
from rl_bridge.rollout.assignment import Absence, NoTrajectory, Outcome, sampling_seed
from rl_bridge.rollout.episode import Judge
from rl_bridge.rollout.policy import ChatPolicy
from rl_bridge.rollout.task import REPORT_FILE, EvaluationResult, Policy
from rl_bridge.rollout.worker import ActiveAssignment, KeepTokens, Player
from rl_bridge.types import Ending, Trajectory, Turn


class SingleTurn(Player[Example]):
    """Answers the prompts of a dataset; a group's task is the index of its example.

    `get_example` returns the example of an index; the judge rewards answers.
    """

    def __init__(
        self,
        get_example: Callable[[int], Awaitable[Example]],
        policy: ChatPolicy,
        judge: Judge,
        *,
        max_attempts: int,
        keep_tokens: KeepTokens | None = None,
    ) -> None:
        super().__init__(policy, max_attempts=max_attempts, keep_tokens=keep_tokens)
        self._get_example = get_example
        self._judge = judge

    async def begin(self, active: ActiveAssignment, policy: ChatPolicy, stack: AsyncExitStack) -> Example:
        """Fetch the group's example; it is the same when the group is played again."""
        assert active.assignment.task is not None  # no prompts are held out
        return await self._get_example(active.assignment.task)

    async def attempt(
        self, indices: Sequence[int], active: ActiveAssignment, policy: ChatPolicy, example: Example
    ) -> list[Outcome]:
        """Answer once; raises as `answer_once`."""
        (index,) = indices
        return [await self.answer_once(index, active, policy, example)]

    async def answer_once(
        self, index: int, active: ActiveAssignment, policy: ChatPolicy, example: Example
    ) -> Outcome:
        """Generate and evaluate one answer. The dispatcher makes a group of an assignment's answers.

        Raises:
            RewardError: A reward function raised, and the run is configured to end then.
            PromptRefusedError: The engine refuses the prompt.
        """
        assignment, prompt = active.assignment, policy.prompt(example.prompt)
        if prompt is None:
            return NoTrajectory(
                absence=Absence.NO_TURN,
                reason=f"the prompt of {example.id} leaves no room (rollout.max_length)",
            )
        key, temperature = assignment.sampling_key, assignment.settings.temperature
        seed = None if key is None else sampling_seed(*key, assignment.siblings[index], 0)

        async def answer(number: int, pinned_policy: ChatPolicy) -> tuple[Turn, str]:
            with self.wait_for_turn(active):  # among the prompts of all groups
                return await pinned_policy.answer(prompt, temperature=temperature, seed=seed)

        result = await self.retry(active, policy, answer)
        if isinstance(result, NoTrajectory):  # the policy is not to blame
            return result
        turn, response = result
        # A missing reward is not 0: the answer stays out of its group's baseline.
        reward = await self._judge(example.prompt, response, example.target)
        if reward is None:
            return NoTrajectory(
                absence=Absence.UNSCORED,
                reason="the reward function gave no reward",
                ending=Ending.FAILED_REWARD,
            )
        ending = Ending.COMPLETED if turn.completion.stopped else Ending.TRUNCATED_LENGTH
        return Trajectory(seed=assignment.seeds[index], turns=[turn], ending=ending, reward=reward)


class DatasetReport:
    """Writes the mean reward of the last iteration at the end of a run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def metrics(self, trajectories: Sequence[Trajectory]) -> Mapping[str, float]:
        """Return no metrics beside those that every run logs."""
        return {}

    async def probe(self, policy: Policy) -> Mapping[str, float]:
        """Return no metrics of the greedy policy."""
        return {}

    async def report(self, policy: Policy, result: EvaluationResult) -> None:
        """Write the number and mean reward of the last iteration's answers, and the training time."""
        report = {"last_iteration": self._read_last_iteration(), "train_seconds": result.train_seconds}
        (self._folder / REPORT_FILE).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")

    def _read_last_iteration(self) -> dict[str, Any]:
        """Read it from the log: a process that resumes after the last iteration has not seen its answers."""
        last = last_row(self._folder / "metrics.jsonl")
        if not last:  # the log was removed
            return {}
        return {"answers": round(last["rollout/trajectories"]), "mean_reward": last["reward/mean"]}
