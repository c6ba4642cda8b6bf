"""The released LLMJudge: ours, which reads the first number of an answer unless told otherwise."""

from typing import TYPE_CHECKING

from openenv_core.rubrics import LLMJudge as Ours

if TYPE_CHECKING:
    from openenv_core.llm_client import LLMClient


class LLMJudge(Ours):
    """Asks a language model for a score, in a format that the prompt has to ask for.

    Args:
        prompt_template: See `openenv_core.rubrics.LLMJudge`.
        client: Client of the model.
        score_pattern: Regular expression of the score; None: the first number.
        default_score: Score of an answer without one.
        normalize: Whether to clamp scores to 0..1.
    """

    def __init__(
        self,
        prompt_template: str,
        client: "LLMClient",
        *,
        score_pattern: str | None = None,
        default_score: float = 0.0,
        normalize: bool = True,
    ) -> None:
        super().__init__(
            prompt_template,
            client,
            score_pattern=score_pattern,
            default_score=default_score,
            normalize=normalize,
        )
