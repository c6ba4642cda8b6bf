"""The released LLMJudge: ours, which reads the first number of an answer unless told otherwise."""

from typing import TYPE_CHECKING, Any

from openenv_core.rubrics import LLMJudge as Ours

if TYPE_CHECKING:
    from openenv_core.llm_client import LLMClient


class LLMJudge(Ours):
    """Asks a language model for a score, in a format that the prompt has to ask for.

    Args:
        prompt_template: See `openenv_core.rubrics.LLMJudge`.
        client: Client of the model.
        options: Further arguments of that class. By default the first number of an answer is its score, and 0 that of
            an answer without one.
    """

    def __init__(self, prompt_template: str, client: "LLMClient", **options: Any) -> None:
        super().__init__(prompt_template, client, **{"default_score": 0.0, **options})
