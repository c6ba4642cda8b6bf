"""Episodes whose answers are sampled here, token for token, to be trained on."""

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rl_bridge.errors import ModelError, PromptRefusedError
from rl_bridge.gateway.episode import CallSettings, GatewayEpisode, ToolPort
from rl_bridge.gateway.messages import (
    Finish,
    FunctionCall,
    GatewayError,
    Message,
    ModelRequest,
    Reply,
    ReplyHead,
)
from rl_bridge.gateway.rows import turns_of
from rl_bridge.gateway.tree import CallNode
from rl_bridge.rollout.policy import ChatPolicy
from rl_bridge.tokens.chat import ChatTokenizer
from rl_bridge.tokens.tool_calls import (
    OPEN,
    THOUGHT,
    THOUGHT_END,
    CallStyle,
    UnparsableCall,
    parse_tool_calls,
)
from rl_bridge.types import Completion, Turn


class SampledEpisode(GatewayEpisode):
    """An episode whose prompts are tokenized here, and whose answers come with their tokens.

    Args:
        policy: The policy, bound to a replica.
        settings: How calls are answered.
        tools: The environment's tools; None if it has none for agents.
    """

    def __init__(self, policy: ChatPolicy, settings: CallSettings, tools: ToolPort | None = None) -> None:
        super().__init__(settings, tools)
        self._policy = policy
        self._tokenizer: ChatTokenizer = policy.tokenizer
        self._style = settings.style or self._tokenizer.call_style

    def turns(self) -> list[Turn]:
        """Return the answers to be learned from; see `rl_bridge.gateway.rows.turns_of`."""
        return turns_of(self.tree)

    def count_tokens(self, request: ModelRequest) -> int:
        """See `GatewayEpisode.count_tokens`."""
        with _convert_model_errors():
            return len(self.tree.prepare(request)[0].prompt())

    def tokenize(
        self, request: ModelRequest, parent: CallNode | None, rest: Sequence[Message]
    ) -> Sequence[int]:
        """See `GatewayEpisode.tokenize`."""
        messages = [message.for_template() for message in rest]
        if parent is None:
            return self._tokenizer.render_opening(messages, request.functions)
        # An answer that was cut lacks the token that ends it.
        end = () if parent.stopped else self._tokenizer.stop_token_ids[:1]
        return (*end, *self._tokenizer.continuation(messages, request.functions))

    def prepare(self, request: ModelRequest) -> tuple[CallNode, Sequence[CallNode], Sequence[int]]:
        """See `GatewayEpisode.prepare`."""
        if request.functions and self._style is None:
            raise GatewayError(
                "expected no tools, as the checkpoint's chat template does not define how calls are written; set "
                "model.tool_calls to hermes, llama or xml, whichever it was trained to"
            )
        limit = f"{self._policy.max_length} tokens"
        if not self._policy.may_have_room((), [message.for_template() for message in request.messages]):
            raise self.make_full_error("its text", limit)
        with _convert_model_errors():
            node, unclear = self.tree.prepare(request)
        prompt = node.prompt()
        if not self._policy.has_room(prompt):
            raise self.make_full_error(f"{len(prompt)} tokens", limit)
        return node, unclear, prompt

    async def complete(
        self, node: CallNode, prompt: Sequence[int], head: ReplyHead, request: ModelRequest, number: int
    ) -> tuple[Completion, Reply]:
        """See `GatewayEpisode.complete`."""
        settings = self.settings
        try:
            turn, _ = await self._policy.answer(
                prompt,
                temperature=settings.temperature,
                seed=None if settings.seed_of is None else settings.seed_of(number),
                max_new_tokens=request.max_tokens,
            )
        except PromptRefusedError as error:
            raise GatewayError(str(error)) from error
        return turn.completion, self._read(turn.completion, prompt, head, request)

    def _read(
        self, completion: Completion, prompt: Sequence[int], head: ReplyHead, request: ModelRequest
    ) -> Reply:
        """Read the thought, the text and the calls of an answer; what cannot be read as a call is text."""
        tokenizer, style = self._tokenizer, self._style
        in_thought = tokenizer.opens_thought(prompt)
        thought, text = _split_thought(tokenizer.text(completion.tokens), in_thought)
        calls: tuple[FunctionCall, ...] = ()
        if request.functions and style is not None:
            written = tokenizer.decode_written(completion.tokens)
            parsed = parse_tool_calls(
                written,
                style=style,
                functions=request.functions,
                repair=self.settings.repair and completion.stopped,
                in_thought=in_thought,
            )
            if parsed and not isinstance(parsed, UnparsableCall):
                calls = tuple(
                    FunctionCall(f"call_{secrets.token_hex(12)}", call.name, dict(call.arguments))
                    for call in parsed
                )
                said = _split_thought(written, in_thought)[1]
                text = "" if style is CallStyle.LLAMA else said.partition(OPEN)[0]
        ended = Finish.STOP if completion.stopped else Finish.LENGTH
        return Reply(
            head=head,
            text=text.strip(),
            thought=thought.strip(),
            calls=calls,
            finish=Finish.CALLS if calls else ended,
            completion_tokens=len(completion.tokens),
        )


def _split_thought(text: str, in_thought: bool) -> tuple[str, str]:
    """Return the thought at the beginning of an answer, and the rest."""
    thought, closing, after = text.partition(THOUGHT_END)
    opened = in_thought or thought.lstrip().startswith(THOUGHT)
    if not closing and not opened:
        return "", text
    return thought.lstrip().removeprefix(THOUGHT), after


@contextmanager
def _convert_model_errors() -> Iterator[None]:
    try:
        yield
    except ModelError as error:
        raise GatewayError(str(error)) from error
