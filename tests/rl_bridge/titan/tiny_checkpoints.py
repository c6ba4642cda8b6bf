"""Random checkpoints of every supported architecture, small, and with nothing at a value that would hide a mistake."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from train_samples import train_sample

from rl_bridge.buffer.batch import TrainBatch

VOCABULARY = 50
POSITIONS = 64
WIDTH = 64

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "initializer_range": 0.1,  # attention that hardly attends would not tell where tokens are
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}
# With heads of 16 the wavelengths are 6, 20, 63 and longer: one stays, one is interpolated, the others are stretched.
STRETCHED = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    # Heads of another size than the width's share, as in Qwen3 0.6B and 4B.
    "qwen3": ("qwen3", {"head_dim": 24, "tie_word_embeddings": False, "rope_parameters": PLAIN}),
    "qwen3-tied": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True, "rope_parameters": PLAIN}),
    "qwen3-moe": (
        "qwen3_moe",
        {
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "tie_word_embeddings": False,
            "rope_parameters": PLAIN,
        },
    ),
    "qwen2": ("qwen2", {"tie_word_embeddings": False, "rms_norm_eps": 1e-5, "rope_parameters": PLAIN}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True, "rope_parameters": PLAIN}),
    "llama": ("llama", {"tie_word_embeddings": False, "rms_norm_eps": 1e-5, "rope_parameters": PLAIN}),
    # As Llama 3.1 8B, and as Llama 3.2 1B.
    "llama-stretched": (
        "llama",
        {"tie_word_embeddings": False, "rms_norm_eps": 1e-5, "rope_parameters": STRETCHED},
    ),
    "llama-tied": (
        "llama",
        {"tie_word_embeddings": True, "rms_norm_eps": 1e-5, "rope_parameters": STRETCHED},
    ),
}
NAMES = sorted(ARCHITECTURES)


def make_checkpoint(
    folder: Path,
    name: str,
    *,
    most_a_file: str = "1GB",
    score: bool = False,
    **changes: Any,
) -> Path:
    """Write one of `NAMES`, with changes to its configuration; with `score` it is a reward model."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    kind, options = ARCHITECTURES[name]
    config = AutoConfig.for_model(kind, **{**COMMON, **options, **changes})
    torch.manual_seed(4)
    if score:
        config.num_labels = 1
        model = AutoModelForSequenceClassification.from_config(config)
    else:
        model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():  # norms of one and biases of zero hide mistakes in their place
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter.uniform_(0.5, 1.5)
            if "bias" in parameter_name:
                parameter.uniform_(-0.5, 0.5)
    model.float().save_pretrained(str(folder), max_shard_size=most_a_file)
    return folder


def titan(
    path: Path, *, max_length: int = 32, dtype: str = "float32", trainable: bool = False, **options: Any
) -> Any:
    """A model of ours, on the CPU."""
    from rl_bridge.titan.model import TitanModel

    device = torch.device("cpu")
    return TitanModel(path, dtype=dtype, max_length=max_length, trainable=trainable, device=device, **options)


def load_reference(folder: Path) -> Any:
    """What transformers makes of a checkpoint, in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32).eval()


def rows(count: int = 5, length: int = 17, *, seed: int = 2) -> Tensor:
    """Random tokens, shape [count, length]."""
    return torch.randint(0, VOCABULARY, (count, length), generator=torch.Generator().manual_seed(seed))


def logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Of each token but the first, given those before it: shape [B, L - 1]."""
    return torch.log_softmax(logits[:, :-1], dim=-1).gather(-1, tokens[:, 1:].unsqueeze(-1)).squeeze(-1)


def every_token(tokens: Tensor) -> TrainBatch:
    """Rows as a batch in which each token but the first is one of the loss."""
    mask = [0] + [1] * (tokens.shape[1] - 1)
    return TrainBatch.from_samples(
        [
            train_sample(row.tolist(), mask, logprob=0.0, trajectory=number)
            for number, row in enumerate(tokens)
        ]
    )


def model_logprobs(model: Any, tokens: Tensor) -> Tensor:
    """What a model of ours says of each token but the first: shape [B, L - 1]."""
    with model.spmd():
        outputs = model.outputs(model.pack(every_token(tokens)))
    found: Tensor = outputs.logprobs.view(len(tokens), -1)
    return found


def documents() -> TrainBatch:
    """Documents of 1 to 24 tokens, with loss tokens here and there among what others said."""
    random = np.random.default_rng(5)
    samples = []
    for number, length in enumerate([25, 2, 3, 3, 8, 13, 7, 21, 5, 2]):
        mask = random.random(length) < 0.5
        mask[0], mask[-1] = False, True
        tokens = random.integers(0, VOCABULARY, size=length).tolist()
        advantage = float(random.normal())
        samples.append(
            train_sample(tokens, mask.tolist(), logprob=-4.0, advantage=advantage, trajectory=number)
        )
    return TrainBatch.from_samples(samples)
