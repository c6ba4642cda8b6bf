"""One episode at the gateway: its key, its calls, and the answers to them."""

import asyncio
import secrets
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final, Protocol

from openenv_core.errors import OpenEnvError
from rl_bridge.errors import BridgeError, GeneratorError
from rl_bridge.gateway.messages import TOO_LONG, GatewayError, Message, ModelRequest, Reply, ReplyHead
from rl_bridge.gateway.tree import CallNode, CallTree
from rl_bridge.tokens.tool_calls import CallStyle
from rl_bridge.types import Completion


class ToolPort(Protocol):
    """The tools of an episode's environment, offered to its agent over MCP."""

    functions: Sequence[Mapping[str, Any]]
    """The tools, in the form that chat templates take."""

    async def call(self, name: str, arguments: Mapping[str, Any]) -> tuple[str, bool]:
        """Call a tool; returns its result as text, and whether the call failed."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSettings:
    """How the calls of an episode are answered.

    Attributes:
        temperature: Of all answers, whatever the agent asks for: the trainer computes with one temperature.
        max_calls: The most answers; None for no limit.
        repair: Whether a call in almost valid JSON is repaired.
        style: How the policy writes calls; None for the style of its chat template.
        seed_of: Returns the seed of an answer by its number in the episode; None to let the engine draw.
        is_excluded: Whether a call is left out of training.
        wait_for_turn: Entered for every answer, which waits for those of other episodes too.
    """

    temperature: float = 1.0
    max_calls: int | None = None
    repair: bool = False
    style: CallStyle | None = None
    seed_of: Callable[[int], int] | None = None
    is_excluded: Callable[[ModelRequest], bool] = lambda request: False
    wait_for_turn: Callable[[], AbstractContextManager[None]] = nullcontext


@dataclass(frozen=True, slots=True)
class RetryMarks:
    """What a client says about a request that it may have sent before.

    Attributes:
        count: How often it has sent it before; 0 if it does not say.
        key: Its own name of the request; None if it has none.
    """

    count: int = 0
    key: str | None = None


@dataclass(slots=True, eq=False)
class CallRecord:
    """A call and the work on its answer, which ends when nobody waits for it any more."""

    node: CallNode
    head: ReplyHead
    digest: bytes
    task: "asyncio.Task[Reply]"
    waiters: int = 0

    @property
    def is_usable(self) -> bool:
        """Whether its answer is there or being sampled."""
        if not self.task.done():
            return not self.task.cancelling()
        return not self.task.cancelled() and self.task.exception() is None

    def join(self) -> "CallRecord":
        """Count one more client that waits for the answer."""
        self.waiters += 1
        return self

    def leave(self, *, delivered: bool) -> None:
        """Count one client less; without any the answer is aborted."""
        self.waiters -= 1
        if delivered:
            self.node.delivered = True
        elif not self.waiters and not self.task.done():
            self.task.cancel()


KEY_BYTES: Final = 24


class GatewayEpisode(ABC):
    """The calls of one episode, under a random key that ends with it.

    A record is begun before anything is sampled, and ended before the reply leaves. A request that its client marks as
    a retry is answered from its record; any other one is sampled anew, even if it is equal to an earlier one.

    Args:
        settings: How calls are answered.
        tools: The environment's tools; None if it has none for agents.
    """

    def __init__(self, settings: CallSettings, tools: ToolPort | None = None) -> None:
        self.key = f"sk-{secrets.token_urlsafe(KEY_BYTES)}"
        self.tools = tools
        self.over = asyncio.Event()
        """Set when a limit ends the episode: the agent gets no more answers."""
        self.failure: Exception | None = None
        """The model's latest failure; None after an answer."""
        self.was_full = False
        """Whether a chat was refused because it left no room for an answer."""
        self.tree = CallTree(self.tokenize, is_excluded=settings.is_excluded)
        """Its calls."""
        self.settings = settings
        self._by_digest: defaultdict[bytes, list[CallRecord]] = defaultdict(list)
        self._by_key: dict[str, CallRecord] = {}
        self._tasks: set[asyncio.Task[Reply]] = set()
        self._closed = False

    @property
    def calls(self) -> int:
        """How many calls were begun."""
        return len(self.tree.nodes)

    def request(self, request: ModelRequest, marks: RetryMarks) -> CallRecord:
        """Return the record of a request, begun now unless it is a retry; its caller has to `leave` it.

        Raises:
            GatewayError: The episode is over, or the chat cannot be answered.
        """
        if self._closed or self.over.is_set():
            raise GatewayError("the episode is over", status=HTTPStatus.FORBIDDEN, code="episode_over")
        record = self._find_retried(request, marks)
        if record is None:
            record = self._begin(request)
            self._by_digest[request.digest].append(record)
        else:
            self.tree.repeat(record.node)
        if marks.key is not None:
            self._by_key[marks.key] = record
        return record.join()

    @abstractmethod
    def count_tokens(self, request: ModelRequest) -> int:
        """Return how many tokens the prompt of a request would have; nothing is recorded."""

    @abstractmethod
    def tokenize(
        self, request: ModelRequest, parent: CallNode | None, rest: Sequence[Message]
    ) -> Sequence[int]:
        """Return the tokens that a request adds to its parent's answer; see `rl_bridge.gateway.tree.Tokenize`."""

    @abstractmethod
    def prepare(self, request: ModelRequest) -> tuple[CallNode, Sequence[CallNode], Sequence[int]]:
        """Return a request's call and what else it may continue, as `CallTree.prepare` does, and its whole prompt.

        Raises:
            GatewayError: The chat cannot be answered.
        """

    @abstractmethod
    async def complete(
        self, node: CallNode, prompt: Sequence[int], head: ReplyHead, request: ModelRequest, number: int
    ) -> tuple[Completion, Reply]:
        """Have the model answer the call of this number in the episode; may raise anything."""

    async def close(self) -> None:
        """End the key, and abort what is being sampled."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _find_retried(self, request: ModelRequest, marks: RetryMarks) -> CallRecord | None:
        """Return the record of the request that this one repeats; None if there is none, or no telling which."""
        if marks.key is not None and (named := self._by_key.get(marks.key)) is not None:
            if named.digest != request.digest:
                raise GatewayError("expected an Idempotency-Key of this request's own, got another request's")
            return named if named.is_usable else None
        if not marks.count:
            return None
        usable = [
            record
            for record in self._by_digest[request.digest]
            if record.is_usable and not record.node.children
        ]
        candidates = [record for record in usable if not record.node.delivered] or usable
        return candidates[0] if len(candidates) == 1 else None

    def _begin(self, request: ModelRequest) -> CallRecord:
        settings, number = self.settings, self.calls
        if settings.max_calls is not None and number >= settings.max_calls:
            self.over.set()
            raise GatewayError(
                f"the episode is over: it has had its {settings.max_calls} answers",
                status=HTTPStatus.FORBIDDEN,
                code="episode_over",
            )
        node, unclear, prompt = self.prepare(request)
        self.tree.begin(node, unclear)
        head = ReplyHead(
            id=secrets.token_hex(12),
            created=int(time.time()),
            model=request.model,
            prompt_tokens=len(prompt),
            cached_tokens=len(prompt) - len(node.added),
        )
        task = asyncio.create_task(self._answer(node, prompt, head, request, number))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return CallRecord(node, head, request.digest, task)

    def make_full_error(self, what: str, limit: str) -> GatewayError:
        """Return the error for a chat that leaves no room for an answer, and record that there was one."""
        self.was_full = True
        return GatewayError(
            f"prompt is too long: {what} leaves no room for an answer in the context, whose maximum context length is "
            f"{limit}",
            code=TOO_LONG,
        )

    async def _answer(
        self, node: CallNode, prompt: Sequence[int], head: ReplyHead, request: ModelRequest, number: int
    ) -> Reply:
        try:
            with self.settings.wait_for_turn():
                completion, reply = await self.complete(node, prompt, head, request, number)
        except GatewayError:
            raise
        except Exception as error:
            known = isinstance(error, BridgeError | OpenEnvError)
            reason = str(error) if known else f"{type(error).__name__}: {error}"
            self.failure = error if known else GeneratorError(reason)
            raise GatewayError(
                f"the policy did not answer: {reason}",
                status=HTTPStatus.SERVICE_UNAVAILABLE,
                code="overloaded",
            ) from error
        self.failure = None
        self.tree.end(node, completion, reply)
        return reply
