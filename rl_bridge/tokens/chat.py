"""The chat template of a checkpoint's own tokenizer."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TypedDict

from rl_bridge.errors import MissingStack, ModelError

REMEMBERED_CHATS = 4096
"""With prompts of thousands of tokens these take some 200 MB; more would not be worth its memory."""


class Message(TypedDict):
    """One message of a chat, as chat templates expect it."""

    role: str
    content: str


class ChatTokenizer:
    """Turns messages into a prompt's token ids, and a completion's token ids into text.

    Args:
        path: A folder in the Hugging Face layout.
        thinking: What chat templates that ask for `enable_thinking` are told; others do not see it.

    Raises:
        ModelError: The folder has no tokenizer, or the tokenizer has no chat template or end token.
        MissingStack: transformers is not installed.
    """

    def __init__(self, path: str | Path, *, thinking: bool = False) -> None:
        self._thinking = thinking
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise MissingStack("transformers") from error
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
        except (OSError, ValueError) as error:
            raise ModelError(
                f"expected a tokenizer in the Hugging Face layout at {str(path)!r}: {error}"
            ) from error
        if not self._tokenizer.chat_template:
            raise ModelError(
                f"the tokenizer at {str(path)!r} has no chat template; use an instruction-tuned checkpoint"
            )
        if self._tokenizer.eos_token_id is None:
            raise ModelError(f"the tokenizer at {str(path)!r} names no end-of-sequence token")
        self.stop_token_ids: tuple[int, ...] = (int(self._tokenizer.eos_token_id),)
        self._prompt_of_text = lru_cache(maxsize=REMEMBERED_CHATS)(self._encode)

    def _encode(self, messages: tuple[tuple[str, str], ...]) -> tuple[int, ...]:
        text = self._tokenizer.apply_chat_template(
            [{"role": role, "content": content} for role, content in messages],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=self._thinking,
        )
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The prompt's token ids, the opening of the assistant's answer included.

        A chat seen before is answered from a bounded memory: small environments repeat themselves.
        """
        return self._prompt_of_text(tuple((m["role"], m["content"]) for m in messages))

    def text(self, tokens: Sequence[int]) -> str:
        """The text of a completion, without special tokens."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))
