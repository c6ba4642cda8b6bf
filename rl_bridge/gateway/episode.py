"""One episode at the gateway: its key, its calls, and the answers that are sampled for it."""

import asyncio
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final, Protocol

from rl_bridge.errors import BridgeError, GeneratorError, ModelError, PromptRefusedError
from rl_bridge.gateway.messages import (
    TOO_LONG,
    Finish,
    FunctionCall,
    GatewayError,
    ModelRequest,
    Reply,
    ReplyHead,
)
from rl_bridge.gateway.rows import turns_of
from rl_bridge.gateway.tree import CallNode, CallTree
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


class GatewayEpisode:
    """The calls of one episode, under a random key that ends with it.

    A record is begun before anything is sampled, and ended before the reply leaves. A request that its client marks as
    a retry is answered from its record; any other one is sampled anew, even if it is equal to an earlier one.

    Args:
        policy: The policy, bound to a replica.
        settings: How calls are answered.
        tools: The environment's tools; None if it has none for agents.
    """

    def __init__(self, policy: ChatPolicy, settings: CallSettings, tools: ToolPort | None = None) -> None:
        self.key = f"sk-{secrets.token_urlsafe(KEY_BYTES)}"
        self.tools = tools
        self.over = asyncio.Event()
        """Set when a limit ends the episode: the agent gets no more answers."""
        self.failure: BridgeError | None = None
        """The engine's latest failure; None after an answer."""
        self.was_full = False
        """Whether a chat was refused because it left no room for an answer."""
        self._policy = policy
        self._settings = settings
        self._tokenizer: ChatTokenizer = policy.tokenizer
        self._style = settings.style or self._tokenizer.call_style
        self._tree = CallTree(self._tokenizer, is_excluded=settings.is_excluded)
        self._by_digest: defaultdict[bytes, list[CallRecord]] = defaultdict(list)
        self._by_key: dict[str, CallRecord] = {}
        self._tasks: set[asyncio.Task[Reply]] = set()
        self._closed = False

    @property
    def calls(self) -> int:
        """How many calls were begun."""
        return len(self._tree.nodes)

    def turns(self) -> list[Turn]:
        """Return the answers to be learned from; see `rl_bridge.gateway.rows.turns_of`."""
        return turns_of(self._tree)

    @property
    def tree(self) -> CallTree:
        """Its calls."""
        return self._tree

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
        if marks.key is not None:
            self._by_key[marks.key] = record
        return record.join()

    def count_tokens(self, request: ModelRequest) -> int:
        """Return how many tokens the prompt of a request would have; nothing is recorded."""
        with _convert_model_errors():
            return len(self._tree.prepare(request)[0].prompt())

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
        settings, number = self._settings, self.calls
        if settings.max_calls is not None and number >= settings.max_calls:
            self.over.set()
            raise GatewayError(
                f"the episode is over: it has had its {settings.max_calls} answers",
                status=HTTPStatus.FORBIDDEN,
                code="episode_over",
            )
        if request.functions and self._style is None:
            raise GatewayError(
                "expected no tools, as the checkpoint's chat template does not define how calls are written; set "
                "model.tool_calls to hermes or llama, whichever it was trained to"
            )
        if not self._policy.may_have_room((), [message.for_template() for message in request.messages]):
            raise self._make_full_error("its text")
        with _convert_model_errors():
            node, unclear = self._tree.prepare(request)
        prompt = node.prompt()
        if not self._policy.has_room(prompt):
            raise self._make_full_error(f"{len(prompt)} tokens")
        self._tree.begin(node, unclear)
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

    def _make_full_error(self, what: str) -> GatewayError:
        self.was_full = True
        return GatewayError(
            f"prompt is too long: {what} leaves no room for an answer in the context, whose maximum context length is "
            f"{self._policy.max_length} tokens",
            code=TOO_LONG,
        )

    async def _answer(
        self, node: CallNode, prompt: Sequence[int], head: ReplyHead, request: ModelRequest, number: int
    ) -> Reply:
        settings = self._settings
        seed = None if settings.seed_of is None else settings.seed_of(number)
        try:
            with settings.wait_for_turn():
                turn, _ = await self._policy.answer(
                    prompt,
                    temperature=settings.temperature,
                    seed=seed,
                    max_new_tokens=request.max_tokens,
                )
        except PromptRefusedError as error:
            raise GatewayError(str(error)) from error
        except Exception as error:
            reason = str(error) if isinstance(error, BridgeError) else f"{type(error).__name__}: {error}"
            self.failure = error if isinstance(error, BridgeError) else GeneratorError(reason)
            raise GatewayError(
                f"the policy did not answer: {reason}",
                status=HTTPStatus.SERVICE_UNAVAILABLE,
                code="overloaded",
            ) from error
        self.failure = None
        reply = self._read(turn.completion, prompt, head, request)
        self._tree.end(node, turn.completion, reply)
        return reply

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
                repair=self._settings.repair and completion.stopped,
                in_thought=in_thought,
            )
            if parsed and not isinstance(parsed, UnparsableCall):
                calls = tuple(
                    FunctionCall(f"call_{secrets.token_hex(12)}", call.name, dict(call.arguments))
                    for call in parsed
                )
                said = _split_thought(written, in_thought)[1]
                text = said.partition(OPEN)[0] if style is CallStyle.HERMES else ""
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
