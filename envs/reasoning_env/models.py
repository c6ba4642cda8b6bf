"""Actions, observations and state. Actions and observations have the fields of the released reasoning_gym_env."""

from typing import Any, Literal, TypeAlias

from pydantic import Field

from openenv_core import Action, Observation, State

Split: TypeAlias = Literal["train", "validation", "test"]


class ReasoningAction(Action):
    """The answer to the question, which ends the episode."""

    answer: str = Field(max_length=100_000, description="the answer to the question")


class ReasoningObservation(Observation):
    """The question after a reset; the verdict after a step. The reward is None after a reset, then the score."""

    question: str | None = Field(default=None, description="the question; null after a step")
    score: float | None = Field(
        default=None, description="the verifier's score of the answer, 0 to 1; null after a reset"
    )
    correct_answer: str | None = Field(
        default=None, description="a correct answer; null after a reset, and where only the verifier knows"
    )
    dataset_metadata: dict[str, Any] | None = Field(
        default=None, description="what the question was generated from; null after a reset"
    )


class ReasoningState(State):
    """The state of an episode, for the trainer and not for the policy: seed and index determine the answer."""

    dataset_name: str | None = Field(default=None, description="the question's data set; null before a reset")
    seed: int | None = Field(default=None, description="the seed of the questions, given or drawn")
    index: int = Field(default=0, ge=0, description="the number of the question after that seed")
    split: Split | None = None
    done: bool = False
