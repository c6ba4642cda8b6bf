"""The calls of an episode as a tree: each call's context is its parent's, the parent's answer, and some new tokens."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from rl_bridge.gateway.messages import Message, ModelRequest, Reply, extend_key
from rl_bridge.types import Completion

Tokens: TypeAlias = npt.NDArray[np.int32]
Tokenize: TypeAlias = "Callable[[ModelRequest, CallNode | None, Sequence[Message]], Sequence[int]]"
"""Returns the tokens that a request adds to the answer of the call that it continues, given the messages after it."""

NO_TOKENS: Tokens = np.zeros(0, np.int32)


@dataclass(slots=True, eq=False, kw_only=True)
class CallNode:
    """One call of the policy. It is begun before it is sampled, and ended before its reply leaves.

    Attributes:
        parent: The call whose answer this call's chat continues; None if it continues none.
        messages: How many messages its chat has.
        added: The tokens of the prompt after the parent's answer, or all of them, shape [P].
        tokens: The answer's tokens, shape [T]; empty until it is ended.
        logprobs: Their log-probabilities, shape [T].
        versions: The versions of the weights that they were sampled from, shape [T].
        begun: When it was begun, in the order of all requests.
        asked: When its request was last made: when it was begun, or by a retry.
        ended: Whether its answer is there; it never is if its sampling was aborted.
        delivered: Whether the reply was sent to the end, as far as can be seen here.
        unclear: Whether a chat continues this answer or another one that is written in the same words.
        excluded: Whether a rule of the user's leaves it out of training.
    """

    parent: "CallNode | None"
    messages: int
    added: Tokens
    request_key: bytes
    excluded: bool
    begun: int = 0
    asked: int = 0
    tokens: Tokens = field(default_factory=lambda: NO_TOKENS)
    logprobs: npt.NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    versions: Tokens = field(default_factory=lambda: NO_TOKENS)
    stopped: bool = True
    reply: Reply | None = None
    ended: bool = False
    delivered: bool = False
    unclear: bool = False
    children: "list[CallNode]" = field(default_factory=list)

    def prompt(self) -> list[int]:
        """Return all tokens before the answer."""
        parts = [self.added]
        node = self.parent
        while node is not None:
            parts += [node.tokens, node.added]
            node = node.parent
        tokens: list[int] = np.concatenate(parts[::-1]).tolist()
        return tokens


class CallTree:
    """The calls of one episode.

    A call continues the one whose answer its chat has, with the same tools and the same messages before it. Of several
    such answers it is the latest in the chat. A call that continues none is a root. So compactions, subagents and other
    side calls are roots or branches, and every token is sampled in exactly one place.
    """

    def __init__(self, tokenize: Tokenize, *, is_excluded: Callable[[ModelRequest], bool]) -> None:
        self._tokenize = tokenize
        self._is_excluded = is_excluded
        self._requests = 0
        self._by_chat: defaultdict[bytes, list[CallNode]] = defaultdict(list)
        """Ended calls, by the key of their chat with the answer."""
        self._last_begun: dict[bytes, int] = {}
        """When the latest call of a chat was begun, by the chat's key."""
        self.roots: list[CallNode] = []
        self.nodes: list[CallNode] = []
        """All calls that were begun, in order."""

    def prepare(self, request: ModelRequest) -> "tuple[CallNode, Sequence[CallNode]]":
        """Find what a request continues, and tokenize the rest; nothing is recorded.

        Returns:
            A call that is not in the tree yet, and answers of which it is unknown which one it continues.

        Raises:
            rl_bridge.errors.ModelError: The checkpoint's chat template refuses the chat.
        """
        keys = request.keys()
        parent, rest, unclear = self._find_parent(request.messages, keys)
        node = CallNode(
            parent=parent,
            messages=len(request.messages),
            added=np.asarray(self._tokenize(request, parent, rest), np.int32),
            request_key=keys[-1],
            excluded=self._is_excluded(request),
        )
        return node, unclear

    def begin(self, node: CallNode, unclear: Sequence[CallNode]) -> None:
        """Record the beginning of a call that `prepare` has made."""
        for other in unclear:
            other.unclear = True
        self.repeat(node)
        node.begun = node.asked
        self.nodes.append(node)
        self._last_begun[node.request_key] = node.begun
        if node.parent is None:
            self.roots.append(node)
        else:
            node.parent.children.append(node)
            node.parent.delivered = True  # its client has the answer

    def end(self, node: CallNode, completion: Completion, reply: Reply) -> None:
        """Record a call's answer."""
        node.tokens = np.asarray(completion.tokens, np.int32)
        node.logprobs = np.asarray(completion.logprobs, np.float32)
        node.versions = np.asarray(completion.versions, np.int32)
        node.stopped, node.reply, node.ended = completion.stopped, reply, True
        self._by_chat[extend_key(node.request_key, reply.as_message())].append(node)

    def repeat(self, node: CallNode) -> None:
        """Record that a call's request is made, at first or by a retry: its agent waits for this answer."""
        self._requests += 1
        node.asked = self._requests

    def is_trained(self, node: CallNode) -> bool:
        """Whether a call's answer is to be learned from.

        An answer is left out if it is unknown whether the agent went on from it: nobody took it, or the same request
        was made once more (a reply can be lost after it was sent whole, or while it is sampled), or its words are
        those of another answer that a chat may continue.
        """
        if not node.ended or node.unclear or node.excluded:
            return False
        return bool(node.children) or (node.delivered and self._last_begun[node.request_key] <= node.asked)

    def _find_parent(
        self, messages: Sequence[Message], keys: Sequence[bytes]
    ) -> tuple[CallNode | None, Sequence[Message], Sequence[CallNode]]:
        """Return the call that a chat continues, the messages after its answer, and the calls that it may be."""
        for index in range(len(messages) - 1, -1, -1):
            message = messages[index]
            if message.role != "assistant" or not (found := self._by_chat.get(keys[index + 1])):
                continue
            ids = [call.id for call in message.calls]
            same_ids = [node for node in found if node.reply and [c.id for c in node.reply.calls] == ids]
            found = same_ids or found
            same_tokens = all(np.array_equal(node.tokens, found[-1].tokens) for node in found)
            return found[-1], messages[index + 1 :], () if same_tokens else found
        return None, messages, ()
