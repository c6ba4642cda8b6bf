"""What vLLM's worker learns for us. vLLM loads this class by name, in the engine's process."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor


class WeightLoader:
    """Mixed into vLLM's worker (`worker_extension_cls`)."""

    model_runner: Any
    device: Any

    def load_policy(self, state: Mapping[str, Tensor]) -> None:
        """Replace the weights in place.

        `reload_weights` rather than `load_weights`: on a CPU the linear layers keep prepacked copies of
        their weights, which only the former renews. It leaves out an output layer that shares the
        embedding's weights, since nothing is loaded under that layer's own name: its copy is renewed here.
        """
        # Moved first, so that a GPU converts them to its own type: vLLM gives the process one thread.
        moved = ((name, value.to(self.device)) for name, value in state.items())
        self.model_runner.reload_weights(weights_iterator=moved)
        head = getattr(self.model_runner.get_model(), "lm_head", None)
        if head is not None and "lm_head.weight" not in state:
            head.quant_method.process_weights_after_loading(head)
