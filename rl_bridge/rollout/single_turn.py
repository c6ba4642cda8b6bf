"""The single-turn loop beside the environment's: sample a prompt, generate answers, evaluate them, add the group.

It stands where a rollout worker stands, for the dispatcher: an assignment in, its outcomes back.
"""

import asyncio
from collections.abc import Iterable
from typing import Any

from rl_bridge.data.examples import Example
from rl_bridge.errors import GeneratorError, PromptRefused
from rl_bridge.rollout.assignment import Absence, Assignment, AssignmentResult, NoTrajectory, Outcome
from rl_bridge.rollout.policy import ChatPolicy
from rl_bridge.rollout.seeds import sampling_seed
from rl_bridge.types import Ending, Trajectory


class SingleTurn:
    """Answers the prompts of a dataset; group n of the run answers its n-th example.

    Args:
        dataloader: The service of `DatasetActor`.
        policy: Answers.
        reward: The service of `RewardActor` or `RewardModelActor`.
    """

    def __init__(self, dataloader: Any, policy: ChatPolicy, reward: Any) -> None:
        self._dataloader = dataloader
        self._policy = policy
        self._reward = reward

    async def play(self, assignment: Assignment) -> AssignmentResult:
        """Have one prompt answered by as many siblings as are asked for.

        Raises:
            RewardFailed: A reward function raised, and the run is to end then.
            PromptRefused: The engine takes no such prompt.
        """
        # 1. Sample: the example is the group's, also when the group is played again.
        example: Example = await self._dataloader.at.route(assignment.group)
        prompt = self._policy.prompt(example.prompt)
        if prompt is None:
            too_long = NoTrajectory(
                absence=Absence.NO_TURN,
                reason=f"the prompt of {example.id} leaves no room (rollout.max_length)",
            )
            return AssignmentResult(lease=assignment.lease, outcomes=(too_long,) * len(assignment.seeds))

        async def answered(seed: int, sibling: int) -> Outcome:
            # 2. Generate.
            key = assignment.sampling_key
            try:
                turn, response = await self._policy.answer(
                    prompt,
                    temperature=assignment.settings.temperature,
                    seed=None if key is None else sampling_seed(*key, sibling, 0),
                )
            except PromptRefused:
                raise
            except GeneratorError as error:  # no policy is to blame; other replicas have been tried by now
                return NoTrajectory(
                    absence=Absence.DROPPED,
                    reason=f"{type(error).__name__}: {error}",
                    ending=Ending.FAILED_POLICY,
                )
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
        siblings = [
            asyncio.ensure_future(answered(seed, sibling))
            for seed, sibling in zip(assignment.seeds, assignment.siblings, strict=True)
        ]
        try:
            outcomes = await asyncio.gather(*siblings)
        finally:
            for one in siblings:  # without one of them the others are nobody's
                one.cancel()
        return AssignmentResult(lease=assignment.lease, outcomes=tuple(outcomes))

    async def cut(self, leases: Iterable[int]) -> None:
        """Answers end by themselves soon enough; what comes too late is thrown away by the ledger."""
