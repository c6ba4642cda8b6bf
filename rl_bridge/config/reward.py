"""`reward.*`: what is added to the environment's own rewards."""

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, model_validator

from rl_bridge.config.section import Count, Fraction, Positive, Section


def _none_of_them(value: object) -> object:
    return () if value is None else value


class RewardConfig(Section):
    """`reward.*`: what is added to the environment's own rewards."""

    illegal_answer: float = -1.0
    """The reward of an answer that is no legal action, or that the environment refuses. It ends the episode."""
    function: Annotated[str | tuple[str, ...], BeforeValidator(_none_of_them)] = ()
    """The dotted path of a function `(prompt, response, target) -> float | None`, or several that vote. What it gives
    an episode is added to what the environment gave; answers to a dataset's prompts are rewarded by it alone. null is
    none."""
    weights: tuple[Positive, ...] = ()
    """Of the votes, one a function; all equal where there are none."""
    rule: Literal["mean", "majority", "min"] = "mean"
    """How votes become a reward."""
    quorum: Fraction = 0.5
    """The share of the weight that has to have voted; with less the answer has no reward, and is left out."""
    timeout_seconds: Positive = 10.0
    """How long a function may take. One that takes longer is killed with all that it started, and votes None."""
    start_timeout_seconds: Positive = 60.0
    """How long the import of the functions may take, in each of their processes."""
    workers: Count = 2
    """Processes in which functions are called, in each replica of monarch.roles.reward."""
    drop_failures: bool = False
    """A function that raises votes None and is counted; false ends the run."""
    model: str | None = None
    """A reward model instead of functions: a checkpoint for sequence classification with one label."""

    @model_validator(mode="after")
    def _one_kind_of_reward(self) -> Self:
        if self.function and self.model is not None:
            raise ValueError(
                "expected reward.function or reward.model, got both; a function may ask a model itself"
            )
        return self

    @model_validator(mode="after")
    def _a_weight_a_vote(self) -> Self:
        functions = 1 if isinstance(self.function, str) else len(self.function)
        if self.weights and len(self.weights) != functions:
            raise ValueError(
                f"expected reward.weights with one a function, {functions}, got {len(self.weights)}"
            )
        return self
