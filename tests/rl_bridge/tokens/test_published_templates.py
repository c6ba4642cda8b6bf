"""Chats that grow token by token, compared with the whole chat rendered by the templates of published checkpoints.

The templates are those that TRL's wheel ships. A small tokenizer stands for the checkpoint's own: it has the template's
special tokens, the end of an answer among them.
"""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
from byte_pairs import save_byte_pairs
from missing import missing

from rl_bridge.errors import ModelError
from rl_bridge.tokens.chat import ChatMessage, ChatTokenizer
from rl_bridge.tokens.conversation import Conversation
from rl_bridge.tokens.tool_calls import CallStyle

pytestmark = pytest.mark.heavy

SAME = "same"
"""The grown chat is, token by token, what the template writes for the whole chat."""
FORGETS = "forgets"
"""The template drops or empties thoughts of earlier answers; the grown chat keeps them. All other text is equal."""
HOW_TO = "needs TRL's chat templates; python3.11 scripts/bootstrap.py test-all installs it"
NO_CALLS = "no calls"
"""The template tells the policy of no tools, or in a style of calls that is not supported."""
NO_THOUGHTS = "no thoughts"
"""The template has no mark of thoughts."""
REFUSED_END, REFUSED_TEXT = "the policy's own end of an answer is not the template's", "leaves out 'tell"
"""Parts of the ModelError for a template that cannot be used."""

ENDS = {
    "cohere": "<|END_OF_TURN_TOKEN|>",
    "deepseek": "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "gemma": "<end_of_turn>",
    "gemma4": "<turn|>",
    "diffusion_gemma": "<turn|>",
    "glm4moe": "<|endoftext|>",
    "gptoss": "<|return|>",
    "idefics3": "<end_of_utterance>",
    "smolvlm": "<end_of_utterance>",
    "lfm2": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "llava": "<|im_end|>",
    "muse": "<|eot|>",
    "nemotron": "<|im_end|>",
    "phi3": "<|end|>",
    "qwen": "<|im_end|>",
}
"""The token that ends an answer, by the beginning of the templates' names; the longest beginning counts."""
BAR = "[|\uff5c]"
MARKS = re.compile(
    rf"<{BAR}[^<>|\uff5c\n' ]+{BAR}>|</?(?:think|tool_call|tool_response|tools|start_of_turn|end_of_turn)>"
)
THOUGHTS = re.compile(r"<think>.*?</think>|\s+", re.DOTALL)
AROUND = {"cohere2": ("", "<|END_RESPONSE|>"), "muse_glimmer": (" to=user<|message|>", "")}
"""Special tokens that the policy writes before and after its text, which the template adds to a message."""
LOOK = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look at a thing.",
            "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
        },
    }
]
CALLS = {
    CallStyle.HERMES: '<tool_call>\n{"name": "look", "arguments": {"at": "the sea"}}\n</tool_call>',
    CallStyle.LLAMA: '{"name": "look", "parameters": {"at": "the sea"}}',
    CallStyle.XML: "<tool_call>\n<function=look>\n<parameter=at>\nthe sea\n</parameter>\n</function>\n</tool_call>",
}
CALL_MESSAGE = {"type": "function", "function": {"name": "look", "arguments": {"at": "the sea"}}}

PLAIN = (SAME, NO_CALLS, NO_THOUGHTS, NO_THOUGHTS)
CALLING = (SAME, SAME, NO_THOUGHTS, NO_THOUGHTS)
THINKING = (SAME, NO_CALLS, FORGETS, NO_CALLS)
OPENING = (FORGETS, NO_CALLS, FORGETS, NO_CALLS)
"""The template opens a thought, or writes an empty one, at the beginning of every answer."""
EXPECTED = {
    # A chat, with tools, with thoughts, with tools and thoughts.
    **dict.fromkeys(
        [
            "cohere",
            "cohere2",
            "diffusion_gemma",
            "gemma",
            "gemma3",
            "gemma4",
            "gemma4_v2",
            "gemma4_v3",
            "gemma4_v4",
            "gemma4_v5",
            "lfm2",
            "lfm2_v2",
            "llama3",
            "muse_glimmer",
            "phi3",
            "phi3_5",
            "qwen2_5_vl",
        ],
        PLAIN,
    ),
    **dict.fromkeys(["llama3_1", "llama3_2", "qwen2_5", "qwen3_instruct_2507", "qwen3_vl"], CALLING),
    **dict.fromkeys(
        [
            "lfm2_2_5",
            "lfm2_2_5_v2",
            "lfm2_2_5_vl",
        ],
        THINKING,
    ),
    **dict.fromkeys(
        ["nemotron_3_5_lightning", "nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra"],
        (SAME, FORGETS, FORGETS, FORGETS),
    ),
    "qwen3_8": (SAME, SAME, FORGETS, FORGETS),
    **dict.fromkeys(["deepseek_r1_distill", "deepseekv3"], OPENING),
    **dict.fromkeys(["qwen3", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6"], (FORGETS,) * 4),
    "glm4moe": (REFUSED_END, NO_CALLS, REFUSED_END, NO_CALLS),
    "gptoss": (REFUSED_END, NO_CALLS, NO_THOUGHTS, NO_THOUGHTS),
    **dict.fromkeys(
        ["idefics3", "llava_next", "smolvlm"], (REFUSED_TEXT, NO_CALLS, NO_THOUGHTS, NO_THOUGHTS)
    ),
}


def templates() -> dict[str, Path]:
    spec = importlib.util.find_spec("trl")  # not imported
    if spec is None or not spec.submodule_search_locations:
        return {}
    folder = Path(spec.submodule_search_locations[0]) / "chat_templates"
    return {file.stem: file for file in folder.glob("*.jinja") if not file.stem.endswith("_training")}


def save_tokenizer(name: str, folder: Path) -> None:
    found = templates()
    if name not in found:
        missing(HOW_TO)
    template = found[name].read_text(encoding="utf-8")
    end = ENDS[max((beginning for beginning in ENDS if name.startswith(beginning)), key=len)]
    save_byte_pairs(folder, template, special=list(dict.fromkeys([end, "<bos>", *MARKS.findall(template)])))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "bos_token": "<bos>"}))


def render(tokenizer: ChatTokenizer, chat: list[dict[str, Any]], functions: list[dict[str, Any]]) -> str:
    whole: Any = chat
    return tokenizer._render(whole, functions)


def compare(tokenizer: ChatTokenizer, around: tuple[str, str], *, tools: bool, thinks: bool) -> str:
    """Play a chat of four answers; returns how the grown prompts differ from the whole chat rendered at once."""
    functions = LOOK if tools else []
    opening: ChatMessage = {"role": "user", "content": "tell what it told"}
    chat: list[dict[str, Any]] = [dict(opening)]
    results: list[list[ChatMessage]] = [
        [{"role": "tool", "name": "look", "content": "a boat"}],
        [{"role": "user", "content": "é 世界"}],
        [{"role": "user", "content": "and the sea?"}],
        [{"role": "tool", "name": "look", "content": "waves"}],
    ]
    same = True
    conversation = Conversation(tokenizer, [opening], functions)
    for number, messages in enumerate(results):
        calls = messages[0]["role"] == "tool"
        if calls and not tools:
            messages = [{"role": "user", "content": messages[0]["content"]}]
        text = CALLS[tokenizer.call_style] if tools and calls and tokenizer.call_style else f"hello {number}"
        thought = "<think>\n" if tokenizer.opens_thought(conversation.prompt) else ""
        if thought or thinks:
            sampled = ("" if thought else "<think>\n") + f"of the sea {number}\n</think>\n\n{text}"
        else:
            sampled = text
        before = list(conversation.prompt)
        answer = tokenizer.answer(sampled.join(around))
        conversation.append_turn(answer, messages)
        # What is trained: the prompt as it was, then the tokens as sampled.
        assert list(conversation.prompt)[: len(before) + len(answer)] == [*before, *answer]
        content = f"{thought}{sampled}"
        if tools and calls:
            content = content.removesuffix(text)
            chat.append({"role": "assistant", "content": content.strip(), "tool_calls": [CALL_MESSAGE]})
        else:
            chat.append({"role": "assistant", "content": content})
        chat += map(dict, messages)
        whole = render(tokenizer, chat, functions)
        grown = tokenizer.raw(list(conversation.prompt))
        same = same and list(conversation.prompt) == list(tokenizer._tokenize(whole))
        if not same:
            left = THOUGHTS.sub("", grown), THOUGHTS.sub("", whole)
            assert left[0] == left[1], left
            assert "of the sea" not in sampled or sampled in grown
    return SAME if same else FORGETS


def outcome(name: str, tokenizer: ChatTokenizer, template: str, *, tools: bool, thinks: bool) -> str:
    if thinks and "<think>" not in template:
        return NO_THOUGHTS
    if tools and tokenizer.call_style is None:
        return NO_CALLS
    try:
        return compare(tokenizer, AROUND.get(name, ("", "")), tools=tools, thinks=thinks)
    except ModelError as error:
        (reason,) = (text for text in (REFUSED_END, REFUSED_TEXT) if text in str(error))
        return reason


def outcomes(name: str, folder: Path) -> tuple[str, ...]:
    save_tokenizer(name, folder)
    template = templates()[name].read_text(encoding="utf-8")
    tokenizers = [ChatTokenizer(folder, thinking=thinks) for thinks in (False, True)]
    return tuple(
        outcome(name, tokenizers[thinks], template, tools=tools, thinks=thinks)
        for thinks in (False, True)
        for tools in (False, True)
    )


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_a_grown_chat_is_what_the_template_writes(name: str, tmp_path: Path) -> None:
    assert outcomes(name, tmp_path) == EXPECTED[name]


def test_every_template_has_an_expectation() -> None:
    if not (found := templates()):
        missing(HOW_TO)
    assert sorted(found) == sorted(EXPECTED)
