"""The chat template of a checkpoint's own tokenizer."""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Final, NotRequired, TypedDict

from rl_bridge.errors import MissingDependencyError, ModelError
from rl_bridge.tokens.tool_calls import THOUGHT, CallStyle, style_of_template

CHAT_CACHE_SIZE = 4096
"""Cached prompts; with thousands of tokens each they take some 200 MB, and more would not be worth its memory."""

ANSWER_PLACEHOLDER: Final = "@the answer@"
"""Stands in for an answer, to find what the template writes after one."""
EXTRA_END_TOKENS: Final = ("<|eom_id|>",)
"""Tokens other than the end of sequence that end an answer: Llama's, after a call."""
TAIL_TOKENS: Final = 16
"""Last tokens of a prompt that hold the opening mark of a thought, even if the tokenizer has no token for it."""
_EXTERNAL_ROLES: Final = ("user", "tool")


class ChatMessage(TypedDict):
    """One message of a chat, as chat templates expect it."""

    role: str
    content: str
    name: NotRequired[str]
    """The tool that a message of the role `tool` is from; some templates write it."""
    tool_calls: NotRequired[list[dict[str, Any]]]
    """The calls in a message of the assistant that the policy did not write."""


class ChatTokenizer:
    """Turns messages into a prompt's token ids, and a completion's token ids into text.

    Args:
        path: A folder in the Hugging Face layout.
        thinking: The value of `enable_thinking` for chat templates that use it.

    Raises:
        ModelError: The folder has no tokenizer, or the tokenizer has no chat template or end token.
    """

    def __init__(self, path: str | Path, *, thinking: bool = False) -> None:
        self._thinking = thinking
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise MissingDependencyError.of_import(error) from error
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
        end: str = self._tokenizer.eos_token
        eos = int(self._tokenizer.eos_token_id)
        template = str(self._tokenizer.chat_template)
        added = self._tokenizer.added_tokens_decoder
        special = {end, *(token.content for token in added.values() if token.special)}
        # A template's marks around thoughts, calls and their results are often not special tokens.
        marks = {
            token.content for token in added.values() if _is_mark(token.content) and token.content in template
        }
        self._special, self._steering = _compile_any(special), _compile_any(special | marks)
        vocabulary = self._tokenizer.get_added_vocab()
        self._end_token_ids = {
            end: eos,
            **{more: int(vocabulary[more]) for more in EXTRA_END_TOKENS if more in vocabulary},
        }
        self.stop_token_ids: tuple[int, ...] = tuple(self._end_token_ids.values())
        self._end_ids = {*self.stop_token_ids, *(number for number, token in added.items() if token.special)}
        self.call_style: CallStyle | None = style_of_template(template)
        """How the chat template tells the policy to write tool calls; None if it does not."""
        self._prompt_of_text = lru_cache(maxsize=CHAT_CACHE_SIZE)(self._encode)

    def _encode(self, messages: tuple[tuple[str, str], ...]) -> tuple[int, ...]:
        chat: list[ChatMessage] = [{"role": role, "content": content} for role, content in messages]
        return self._tokenize(self._render_chat(chat))

    def _tokenize(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def _render(self, messages: Sequence[ChatMessage], functions: Sequence[Mapping[str, Any]] = ()) -> str:
        from jinja2 import TemplateError  # transformers needs it for chat templates

        try:
            return str(
                self._tokenizer.apply_chat_template(
                    list(messages),
                    tools=list(functions) or None,
                    tokenize=False,
                    add_generation_prompt=True,
                    enable_thinking=self._thinking,
                )
            )
        except TemplateError as error:
            roles = ", ".join(message["role"] for message in messages)
            raise ModelError(
                f"expected the checkpoint's chat template to take a chat of {roles}, it refuses: {error}"
            ) from error

    def _render_chat(
        self, messages: Sequence[ChatMessage], functions: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        escaped = [self._escape_message(message) for message in messages]
        text = self._render(escaped, functions)
        # Templates of vision models iterate over a message's parts, of which plain text has none.
        left_out = next(
            (m for m in escaped if m["role"] == "user" and m["content"].strip() not in text), None
        )
        if left_out is not None:
            raise ModelError(
                f"expected the checkpoint's chat template to write a message's text, it leaves out "
                f"{left_out['content']!r:.40}; use a checkpoint whose template takes plain text"
            )
        return text

    def prompt(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        """Return the prompt's token ids, including the opening of the assistant's answer.

        In user and tool messages, text that spells a special token is broken up by a space; system and assistant
        messages are trusted. Prompts are kept in a bounded cache, as small environments repeat themselves.
        """
        return self._prompt_of_text(tuple((m["role"], m["content"]) for m in messages))

    def render_opening(
        self, messages: Sequence[ChatMessage], functions: Sequence[Mapping[str, Any]]
    ) -> tuple[int, ...]:
        """Like `prompt`, uncached, for a chat with tools; ModelError if the template leaves the tools out."""
        text = self._render_chat(messages, functions)
        if functions and functions[0]["function"]["name"] not in text:
            raise ModelError(
                "expected a chat template that tells the policy of its tools, got one that leaves them out; "
                "use a checkpoint that was trained to call tools"
            )
        return self._tokenize(text)

    def continuation(
        self, messages: Sequence[ChatMessage], functions: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[int, ...]:
        """Return the token ids between the token that ended an answer and the beginning of the next one.

        In the messages, text that spells a special token or one of the template's marks is broken up by a space.

        Args:
            messages: The environment's messages after the answer.
            functions: The tools that the chat was opened with: some tokenizers have another template for chats with
                tools, and some templates write all of such a chat differently.

        Raises:
            ModelError: The template does not end an answer with one of the tokens that end it.
        """
        question: ChatMessage = {"role": "user", "content": ""}
        new_messages: list[ChatMessage] = [
            {**message, "content": _break_specials(self._steering, message["content"])}
            for message in messages
        ]
        text = self._render(
            [question, {"role": "assistant", "content": ANSWER_PLACEHOLDER}, *new_messages], functions
        )
        after_answer = text.partition(ANSWER_PLACEHOLDER)[2].lstrip()  # the tools are described before it
        # The policy writes whatever special tokens precede the end: Cohere's close the answer's text.
        end = None
        while end is None and (special := self._special.match(after_answer)) is not None:
            if special[0] in self._end_token_ids:
                end = special[0]
            else:
                after_answer = after_answer[special.end() :].lstrip()
        if end is None:
            raise ModelError(
                f"expected the chat template to write {self._tokenizer.eos_token!r} after an answer, "
                f"got {after_answer!r:.40}; the policy's own end of an answer is not the template's"
            )
        # Tokenised together with the end token, as in the middle of a chat.
        first, *rest = self._tokenize(after_answer)
        if first != self._end_token_ids[end]:
            raise ModelError(f"expected {end!r} to be one token, {self._end_token_ids[end]}, got {first}")
        return tuple(rest)

    def opens_thought(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt ends with the mark that opens a thought, which the answer then continues.

        Some templates open every answer like this. Marks within messages do not count, as they are not at the end.
        """
        end = self._tokenizer.decode(list(prompt[-TAIL_TOKENS:]), skip_special_tokens=False)
        return str(end).rstrip().endswith(THOUGHT)

    def answer(self, text: str) -> tuple[int, ...]:
        """Return the token ids of an answer to be learned: its text, and the token that ends it."""
        return (*self._tokenize(text), self.stop_token_ids[0])

    @cached_property
    def max_token_chars(self) -> int:
        """The most characters that a single token stands for."""
        return max(map(len, self._tokenizer.get_vocab()))

    def _escape_message(self, message: ChatMessage) -> ChatMessage:
        if message["role"] not in _EXTERNAL_ROLES:
            return message
        return {**message, "content": _break_specials(self._special, message["content"])}

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of a completion, without special tokens."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def decode_written(self, tokens: Sequence[int]) -> str:
        """Return the text of a completion as written: with special tokens, except one that ended it.

        In some checkpoints the marks of a call are special tokens. An engine may stop at more of them than requested:
        those in the checkpoint's `generation_config.json`.
        """
        written_tokens = list(tokens[:-1] if tokens and tokens[-1] in self._end_ids else tokens)
        return str(self._tokenizer.decode(written_tokens, skip_special_tokens=False))

    def raw(self, tokens: Sequence[int]) -> str:
        """Return the exact text of any tokens, with all special tokens and spaces."""
        return str(
            self._tokenizer.decode(
                list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )


def _is_mark(token: str) -> bool:
    """Whether an added token looks like a mark such as `<think>`; some tokenizers add words and runs of spaces."""
    return len(token) > 1 and not (token[0].isalnum() or token[0].isspace())


def _compile_any(tokens: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))))


def _break_specials(tokens: re.Pattern[str], content: str) -> str:
    return tokens.sub(lambda match: f"{match[0][0]} {match[0][1:]}", content)
