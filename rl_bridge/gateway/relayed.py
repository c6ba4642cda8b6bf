"""Episodes whose model is on a server that only talks: for evaluation, as nothing is known of its tokens."""

import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from openenv_core.evaluation.policies import (
    ChatAnswer,
    ChatModel,
    PolicyError,
    PolicyLostError,
    PolicyRefusedError,
)
from openenv_core.evaluation.records import turn_record
from rl_bridge.gateway.dialects.base import dump_arguments
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
from rl_bridge.gateway.tree import CallNode
from rl_bridge.types import Completion

NO_TOKENS = Completion(tokens=(), logprobs=(), versions=(), stopped=True)


class RelayedEpisode(GatewayEpisode):
    """An episode whose calls are passed on as chats. A model that fails for good ends it.

    Args:
        model: Answers the calls, with settings of its own, whatever the agent asks for.
        settings: The limit on calls; the others do not apply.
        tools: The environment's tools.
        seed: The seed of the first answer; that of each later one is one more.

    Attributes:
        turns: Each answered call as a turn of `openenv_core.evaluation.records.EpisodeRecord`, with `parent`, the index
            of the turn that it continues, or None.
    """

    def __init__(
        self, model: ChatModel, settings: CallSettings, tools: ToolPort | None = None, *, seed: int = 0
    ) -> None:
        super().__init__(settings, tools)
        self.turns: list[dict[str, Any]] = []
        self._model = model
        self._seed = seed
        self._turn_of: dict[int, int] = {}
        """The index of an answered call's turn, by the call's beginning."""

    def count_tokens(self, request: ModelRequest) -> int:
        """Raise GatewayError: the server does not count."""
        raise GatewayError("the model's server counts no tokens of a prompt", status=404, code="not_found")

    def tokenize(
        self, request: ModelRequest, parent: CallNode | None, rest: Sequence[Message]
    ) -> Sequence[int]:
        """Return no tokens."""
        return ()

    def prepare(self, request: ModelRequest) -> tuple[CallNode, Sequence[CallNode], Sequence[int]]:
        """See `GatewayEpisode.prepare`."""
        return *self.tree.prepare(request), ()

    async def complete(
        self, node: CallNode, prompt: Sequence[int], head: ReplyHead, request: ModelRequest, number: int
    ) -> tuple[Completion, Reply]:
        """See `GatewayEpisode.complete`."""
        messages = [_to_openai(message) for message in request.messages]
        functions = [dict(function) for function in request.functions]
        try:
            answer = await self._model.begin(messages, functions, self._seed + number).answer()
        except PolicyRefusedError:
            if not self.turns:
                self.over.set()
                raise
            answer = None  # the chat has outgrown the context
        except (PolicyError, PolicyLostError):
            self.over.set()
            raise
        if answer is None:
            raise self.make_full_error("the chat", "the server's")
        self._record(node, request, answer)
        return NO_TOKENS, _to_reply(answer, head)

    def _record(self, node: CallNode, request: ModelRequest, answer: ChatAnswer) -> None:
        known = 0 if node.parent is None else node.parent.messages + 1
        context = "\n\n".join(f"[{one.role}] {one.content}" for one in request.messages[known:])
        parent = None if node.parent is None else self._turn_of[node.parent.begun]
        fresh = parent is None or parent + 1 != len(self.turns)
        self._turn_of[node.begun] = len(self.turns)
        self.turns.append(turn_record(context, answer.shown, fresh=fresh) | {"parent": parent})


def _to_openai(message: Message) -> dict[str, Any]:
    """Return a message as the chat protocol has it."""
    written: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.role == "tool":
        written["tool_call_id"] = message.call_id
    if message.calls:
        written["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": dump_arguments(call.arguments)},
            }
            for call in message.calls
        ]
    return written


def _to_reply(answer: ChatAnswer, head: ReplyHead) -> Reply:
    """Return an answer as dialects encode it; one with a call that is no valid one is text."""
    calls = [
        FunctionCall(f"call_{secrets.token_hex(12)}", call.name, call.arguments)
        for call in answer.calls
        if isinstance(call.arguments, dict)
    ]
    if len(calls) < len(answer.calls):
        calls = []
    ended = Finish.LENGTH if answer.was_cut else Finish.STOP
    return Reply(
        head=replace(head, prompt_tokens=answer.prompt_tokens),
        text=(answer.text if calls else answer.shown).strip(),
        thought="",
        calls=tuple(calls),
        finish=Finish.CALLS if calls else ended,
        completion_tokens=answer.completion_tokens,
    )
