"""The weights that a run began with, as the engine's checkpoint has them."""

import json
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from rl_bridge.errors import MissingDependencyError, ModelError, WeightsError

OUTPUT = "lm_head.weight"


class Checkpoint:
    """The tensors of a folder in the Hugging Face layout.

    Args:
        path: The folder; its weights are in `*.safetensors`.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._shapes: dict[str, tuple[int, ...]] | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Read the weights.

        Returns:
            Tensors on the CPU under their names.

        Raises:
            ModelError: They cannot be read.
        """
        return {name: tensor for file in self._files() for name, tensor in _read(file).items()}

    def require_like(self, state: Mapping[str, Tensor]) -> None:
        """Check that a state dict has every tensor of the checkpoint, in its shape.

        vLLM only logs which weights it was not given, and goes on with the old ones; shapes it notices when
        some tensors have been replaced already.

        Raises:
            WeightsError: It has not.
            ModelError: The checkpoint cannot be read.
        """
        if self._shapes is None:
            self._shapes = {
                name: shape
                for file in self._files()
                for name, shape in _shapes(file).items()
                if not (name == OUTPUT and self._tied())
            }
        missing = [name for name in self._shapes if name not in state]
        if missing:
            raise WeightsError(
                f"expected all {len(self._shapes)} tensors of the checkpoint at {str(self._path)!r}, "
                f"got {len(state)} without {', '.join(missing[:3])}"
            )
        for name, shape in self._shapes.items():
            if tuple(state[name].shape) != shape:
                raise WeightsError(
                    f"expected {name} of shape {list(shape)}, as in the checkpoint at {str(self._path)!r}, "
                    f"got {list(state[name].shape)}"
                )

    def _tied(self) -> bool:
        """Whether the output layer is the embedding. Some files have it a second time; no trainer sends it so."""
        try:
            config = json.loads((self._path / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ModelError(
                f"expected a checkpoint with a config.json at {str(self._path)!r}: {error}"
            ) from error
        return bool(config.get("tie_word_embeddings"))

    def _files(self) -> list[Path]:
        files = sorted(self._path.glob("*.safetensors"))
        if not files:
            raise ModelError(f"expected weights in *.safetensors at {str(self._path)!r}, found none")
        return files


def _read(file: Path) -> dict[str, Tensor]:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError as error:
        raise MissingDependencyError("safetensors") from error
    try:
        tensors: dict[str, Tensor] = load_file(file)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"cannot read the weights in {str(file)!r}: {error}") from error
    return tensors


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise MissingDependencyError("safetensors") from error
    try:
        with safe_open(file, framework="pt") as weights:
            return {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ModelError(f"cannot read the weights in {str(file)!r}: {error}") from error
