"""Two types that released chat environments name in their signatures."""

from typing import Any, Protocol

from typing_extensions import TypedDict  # pydantic asks for this one before Python 3.12


class Message(TypedDict):
    """One message of a conversation."""

    role: str
    content: str


class ModelTokenizer(Protocol):
    """What such environments use of a tokenizer."""

    def apply_chat_template(
        self,
        conversation: list[Message],
        tokenize: bool = True,
        return_tensors: str | None = None,
        **options: Any,
    ) -> Any:
        """Turn a conversation into text or token ids."""

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **options: Any) -> str:
        """Turn token ids into text."""
