"""Small byte-pair tokenizers in the layout of a checkpoint."""

from collections.abc import Sequence
from pathlib import Path

TEXT = (
    "call the tool and tell what it told",
    '{"name": "look", "arguments": {"at": "the sea"}}',
    "hello world",
)


def save_byte_pairs(folder: Path, template: str, *, special: Sequence[str], plain: Sequence[str] = ()) -> int:
    """Write a byte-pair tokenizer with a chat template; returns the size of its vocabulary.

    Args:
        folder: Created if missing.
        template: The chat template.
        special: Special tokens; the first ends an answer.
        plain: Further tokens that are not special.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT * 9, trainer)
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in plain])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=special[0])
    fast.chat_template = template
    fast.save_pretrained(str(folder))
    return len(fast)
