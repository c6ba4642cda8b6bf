"""A chat with tools, by a tokenizer that has one template for such chats and another for all others."""

from typing import Any

import pytest
from jinja2 import Environment as Jinja
from tool_fixtures import START, TEMPLATE, PieceTokenizer, calling, chat_tokenizer

from rl_bridge.tokens.chat import Message
from rl_bridge.tokens.conversation import Conversation

LOOK = [{"type": "function", "function": {"name": "look", "description": "", "parameters": {}}}]


class TwoTemplates(PieceTokenizer):
    """Takes `TEMPLATE` where it is given tools, as transformers take `tool_use`."""

    def __init__(self) -> None:
        super().__init__()
        self._default = Jinja().from_string(TEMPLATE.replace(f"{START}assistant", f"{START}model"))

    def apply_chat_template(self, messages: Any, *, tokenize: bool, **variables: Any) -> str:
        if variables["tools"] is None:
            return self._default.render(messages=messages, **variables)
        return super().apply_chat_template(messages, tokenize=tokenize, **variables)


def test_a_chat_goes_on_by_the_template_that_it_began_with(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = TwoTemplates()
    tokenizer = chat_tokenizer(monkeypatch, pieces)
    chat: list[Message] = [{"role": "user", "content": "look"}]
    answer, told = calling("look"), Message(role="tool", name="look", content="a tool")
    conversation = Conversation(tokenizer, chat, LOOK)
    conversation.go_on(tokenizer.answer(answer), [told])
    whole = pieces.apply_chat_template(
        [*chat, {"role": "assistant", "content": answer}, told],
        tokenize=False,
        tools=LOOK,
        add_generation_prompt=True,
        enable_thinking=True,
    )
    assert pieces.decode(conversation.prompt, skip_special_tokens=False) == whole
