"""The released types of evaluations, and the harness for Inspect AI."""

from abc import ABC, abstractmethod
from typing import Any, Final

from pydantic import BaseModel, ConfigDict

_OPTIONS: Final = (
    "model_base_url", "max_samples", "max_connections", "temperature", "max_tokens", "epochs", "solver", "scorer"
)  # fmt: skip
"""Parameters passed to Inspect AI unchanged; None means its own default."""


class EvalConfig(BaseModel):
    """The configuration of an evaluation: harness, library versions, dataset and parameters."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True)

    harness_name: str
    harness_version: str
    library_versions: dict[str, str]
    dataset: str
    eval_parameters: dict[str, Any]


class EvalResult(BaseModel):
    """The result of an evaluation: metrics by name."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True)

    config: EvalConfig
    scores: dict[str, Any]


class EvalHarness(ABC):
    """Runs evaluations."""

    @abstractmethod
    def run(
        self,
        harness_version: str,
        library_versions: dict[str, str],
        dataset: str,
        eval_parameters: dict[str, Any],
    ) -> dict[str, Any]:
        """Run an evaluation; return its metrics by name."""

    def run_from_config(self, config: EvalConfig) -> EvalResult:
        """Run the evaluation of a configuration."""
        options = config.model_dump(exclude={"harness_name"})
        return EvalResult(config=config, scores=self.run(**options))

    @property
    def name(self) -> str:
        """The name of the class."""
        return type(self).__name__


class InspectAIHarness(EvalHarness):
    """Runs Inspect AI tasks.

    Args:
        log_dir: Folder of its logs; Inspect AI's default if None.
    """

    def __init__(self, *, log_dir: str | None = None) -> None:
        self.log_dir = log_dir

    def run(
        self,
        harness_version: str,
        library_versions: dict[str, str],
        dataset: str,
        eval_parameters: dict[str, Any],
    ) -> dict[str, Any]:
        """Run a task and return its metrics.

        Args:
            harness_version: Ignored: the installed version is used.
            library_versions: Ignored too.
            dataset: The task, if the parameters have no `task`.
            eval_parameters: `model`, and other arguments of `inspect_ai.eval`: task_args, model_args, model_base_url,
                max_samples, max_connections, temperature, max_tokens, epochs, solver, scorer.

        Raises:
            ImportError: The package `inspect-ai` is not installed.
            ValueError: The parameters have no model.
            RuntimeError: The evaluation failed.
        """
        try:
            from inspect_ai import eval as evaluate  # type: ignore[import-not-found,unused-ignore]
        except ImportError as error:
            raise ImportError("inspect-ai is required by InspectAIHarness; pip install inspect-ai") from error
        if (model := eval_parameters.get("model")) is None:
            raise ValueError("eval_parameters has no 'model'; name one as openai/gpt-4o")
        options = {name: eval_parameters.get(name) for name in _OPTIONS}
        options |= {name: eval_parameters.get(name) or None for name in ("task_args", "model_args")}
        options["log_dir"] = self.log_dir
        given = {name: value for name, value in options.items() if value is not None}
        logs = evaluate(eval_parameters.get("task", dataset), model=model, **given)
        if not logs:
            raise RuntimeError("the evaluation returned no logs; look at the task and the model")
        if logs[0].status != "success":
            raise RuntimeError(f"the evaluation failed with status {logs[0].status}; its log says why")
        results = logs[0].results
        scores = [] if results is None else results.scores
        return {name: metric.value for score in scores for name, metric in score.metrics.items()}
