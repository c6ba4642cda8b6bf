"""What reward actors are told when they start. Apart from them, so that no heavy package is needed to say it."""

from dataclasses import dataclass

from rl_bridge.rewards.function import Ensemble


@dataclass(kw_only=True, slots=True, frozen=True)
class RewardSettings:
    """Reward functions and the processes that they run in.

    Attributes:
        ensemble: The functions, and how their votes are counted.
        workers: Processes of one replica.
        timeout_s: Seconds one function may take for one response.
        start_timeout_s: Seconds the import of the functions may take.
        drop_failures: Whether a function that raises gives None instead of ending the run.
    """

    ensemble: Ensemble
    workers: int
    timeout_s: float
    start_timeout_s: float = 60.0
    drop_failures: bool = False


@dataclass(kw_only=True, slots=True, frozen=True)
class RewardModelSettings:
    """A learned reward model.

    Attributes:
        model_path: A checkpoint for sequence classification with one label, in the Hugging Face layout.
        dtype: What it computes in.
        max_length: Tokens of prompt and response together at most; what is longer has no reward.
        max_batch: Responses a forward pass.
        num_threads: CPU threads.
    """

    model_path: str
    dtype: str = "float32"
    max_length: int = 4096
    max_batch: int = 16
    num_threads: int = 1
