"""What vLLM's worker learns for us. vLLM loads this class by name, in the engine's process."""

from typing import Any

from torch import Tensor


class WeightLoader:
    """Mixed into vLLM's worker (`worker_extension_cls`)."""

    model_runner: Any

    def load_policy(self, state: dict[str, Tensor]) -> None:
        """Replace the weights in place.

        `reload_weights` rather than `load_weights`: on a CPU the linear layers keep prepacked copies of
        their weights, which only the former renews.
        """
        self.model_runner.reload_weights(weights_iterator=iter(state.items()))
