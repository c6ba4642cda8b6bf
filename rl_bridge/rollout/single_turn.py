"""The single-turn loop beside the environment's: sample a prompt, generate answers, evaluate, report."""

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_bridge.data.examples import Example
from rl_bridge.errors import GeneratorError, PromptRefusedError
from rl_bridge.rollout.assignment import (
    Absence,
    Assignment,
    AssignmentResult,
    NoTrajectory,
    Outcome,
    sampling_seed,
)
from rl_bridge.rollout.episode import back_off, shortened
from rl_bridge.rollout.policy import ChatPolicy
from rl_bridge.rollout.task import REPORT_FILE, EvaluationResult, Policy
from rl_bridge.rollout.worker import until_stopped
from rl_bridge.types import Ending, Trajectory, Turn


class SingleTurn:
    """Answers the prompts of a dataset; a group's task is the place of its example.

    Args:
        dataloader: The service of `DatasetActor`.
        policy: Answers.
        reward: The service of `RewardActor` or `RewardModelActor`.
        max_attempts: How often an answer is tried before it is dropped.
    """

    def __init__(self, dataloader: Any, policy: ChatPolicy, reward: Any, *, max_attempts: int) -> None:
        self._dataloader = dataloader
        self._policy = policy
        self._reward = reward
        self._max_attempts = max_attempts
        self._stops: dict[int, asyncio.Event] = {}

    async def play(self, assignment: Assignment) -> AssignmentResult:
        """Have one prompt answered by as many siblings as are asked for, or until `cut` says to stop.

        Raises:
            RewardError: A reward function raised, and the run is to end then.
            PromptRefusedError: The engine takes no such prompt.
        """
        stop = self._stops[assignment.lease] = asyncio.Event()
        try:
            return await self._play(assignment, stop)
        finally:
            del self._stops[assignment.lease]

    async def _play(self, assignment: Assignment, stop: asyncio.Event) -> AssignmentResult:
        # 1. Sample: the example is the group's, also when the group is played again.
        example: Example = await self._dataloader.at.route(assignment.task)
        prompt = self._policy.prompt(example.prompt)
        if prompt is None:
            too_long = NoTrajectory(
                absence=Absence.NO_TURN,
                reason=f"the prompt of {example.id} leaves no room (rollout.max_length)",
            )
            return AssignmentResult(lease=assignment.lease, outcomes=(too_long,) * len(assignment.seeds))

        failures: list[str] = []

        async def answered(seed: int, sibling: int, policy: ChatPolicy) -> Outcome:
            # 2. Generate.
            answer = await self._answer(policy, assignment, prompt, sibling, failures)
            if answer is None:  # no policy is to blame
                return NoTrajectory(absence=Absence.DROPPED, reason=failures[-1], ending=Ending.FAILED_POLICY)
            turn, response = answer
            # 3. Evaluate. No reward is no zero: the answer stays out of its group's baseline.
            reward = await self._reward.evaluate_response.route(
                prompt=example.prompt, response=response, target=example.target
            )
            if reward is None:
                return NoTrajectory(
                    absence=Absence.UNSCORED,
                    reason="the reward function gave no reward",
                    ending=Ending.FAILED_REWARD,
                )
            ending = Ending.COMPLETED if turn.completion.stopped else Ending.TRUNCATED_LENGTH
            return Trajectory(seed=seed, turns=[turn], ending=ending, reward=reward)

        # 4. Add: the dispatcher makes them a group.
        siblings = zip(assignment.seeds, assignment.siblings, strict=True)
        with self._policy.settled() as policy:
            outcomes = await until_stopped([answered(*sibling, policy) for sibling in siblings], stop)
        late = NoTrajectory(absence=Absence.UNFINISHED, reason="it was not answered in time")
        return AssignmentResult(
            lease=assignment.lease,
            outcomes=tuple(outcome or late for outcome in outcomes),
            retried=len(failures),
            last_failure=failures[-1] if failures else None,
        )

    async def _answer(
        self,
        policy: ChatPolicy,
        assignment: Assignment,
        prompt: Sequence[int],
        sibling: int,
        failures: list[str],
    ) -> tuple[Turn, str] | None:
        """Ask the policy, again after each failure; None where all attempts failed, with why in `failures`."""
        key = assignment.sampling_key
        for number in range(self._max_attempts):
            if number:
                await back_off(number)
            try:
                return await policy.answer(
                    prompt,
                    temperature=assignment.settings.temperature,
                    seed=None if key is None else sampling_seed(*key, sibling, 0),
                )
            except PromptRefusedError:
                raise
            except GeneratorError as error:
                failures.append(shortened(f"{type(error).__name__}: {error}"))
        return None

    async def cut(self, leases: Iterable[int]) -> None:
        """Stop the assignments of these leases: they come back with the answers that are finished."""
        for lease in leases:
            if (stop := self._stops.get(lease)) is not None:
                stop.set()


class DatasetReport:
    """Writes the mean reward of the last iteration at the end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def metrics(self, trajectories: Sequence[Trajectory]) -> Mapping[str, float]:
        """Nothing beside what every run logs."""
        return {}

    async def probe(self, policy: Policy) -> Mapping[str, float]:
        """Nothing is known of the greedy policy beside the rewards."""
        return {}

    async def report(self, policy: Policy, result: EvaluationResult) -> None:
        """Write what the last iteration's answers earned."""
        report = {"last_iteration": self._last_iteration(), "train_seconds": result.train_seconds}
        (self._folder / REPORT_FILE).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")

    def _last_iteration(self) -> dict[str, Any]:
        """From the log: a process that resumes a run whose last iteration is trained has not seen its answers."""
        rows = (self._folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        if not rows:  # somebody has taken the log away
            return {}
        last = json.loads(rows[-1])
        return {"answers": round(last["rollout/trajectories"]), "mean_reward": last["reward/mean"]}
