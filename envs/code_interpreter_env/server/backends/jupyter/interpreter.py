"""Kernels of a gateway as sessions' interpreters."""

import asyncio
import logging
from contextlib import suppress
from typing import Any, Final

from openenv_core.sandbox import CodeError, Limits, SandboxUnavailableError

from ..hosted import Collector, ExecutionEnd, HostedInterpreter, HostFailureError
from ..hosted.errand import MOST_BYTES, Errand
from ..hosted.interpreter import Opened, failed, flooded, killed, overdue, plain, raised, refuse_snapshots
from .gateway import Channel, Gateway, KernelRequest, Message, NoRoomError
from .settings import JupyterSettings

logger = logging.getLogger("openenv_core")

INTERRUPT_ALLOWANCE_S: Final = 0.7
"""What an interrupt takes on its way, beside the grace that the limits give."""

LEAVE_TIMEOUT_S: Final = 2.0
"""How long a kernel that is let go may take to remove its folder."""

RATE_WORDS: Final = ("IOPub data rate exceeded", "IOPub message rate exceeded")
"""How a gateway's note on output that it has dropped begins."""


class JupyterInterpreter(HostedInterpreter):
    """One kernel, in a folder of its own, where it shares everything else with the gateway and its other kernels.

    Args:
        gateway: Where kernels come from.
        settings: How it is reached.
        limits: Of the session.
        packages: Imported at the start.
    """

    def __init__(
        self, gateway: Gateway, settings: JupyterSettings, limits: Limits, packages: tuple[str, ...]
    ) -> None:
        super().__init__(limits, packages, isolation="remote", report_files=settings.report_files)
        self._gateway = gateway
        self._settings = settings
        self._kernel: str | None = None
        self._channel: Channel | None = None
        self._had_stdin = False
        self._deletions: set[asyncio.Task[None]] = set()

    async def _begin(self) -> None:
        await self._let_go()
        self._had_stdin = False
        try:
            self._kernel = await self._gateway.create()
        except NoRoomError:
            if not self._deletions:
                raise
            await asyncio.wait(self._deletions)  # the one before still takes the place
            self._kernel = await self._gateway.create()
        self._channel = await self._connected(self._kernel)
        asked = await self._channel.ask("kernel_info_request", {})
        await self._outcome(self._channel, asked, self._settings.start_s)
        if not asked.done.done():
            raise HostFailureError(
                f"expected a kernel to answer within {self._settings.start_s:g} s, got nothing"
            )
        await self._enter(own_folder=True)

    async def _end(self) -> None:
        if self._root and not self._turn.locked() and self._alive() is not None:
            # What is in the folder is all that a kernel leaves. One that is busy, or gone, leaves it.
            with suppress(HostFailureError, TimeoutError):
                await self._ask(Errand("end", root=self._root), LEAVE_TIMEOUT_S)
        self._root = ""
        await self._let_go()
        if self._deletions:
            await asyncio.wait(self._deletions)

    async def _run(
        self, code: str, collector: Collector, timeout_s: float, stdin: str | None
    ) -> ExecutionEnd:
        verdict = await self._ran(code, collector, timeout_s, stdin)
        if verdict.state_lost:
            await self._let_go()  # at once: it may still be busy
        return verdict

    async def _ran(
        self, code: str, collector: Collector, timeout_s: float, stdin: str | None
    ) -> ExecutionEnd:
        channel = await self._ready_channel()
        if stdin is not None or self._had_stdin:
            await self._ask(Errand("stdin", text=stdin or ""), timeout_s)
            self._had_stdin = stdin is not None
        asked = await channel.ask("execute_request", _request(code), _hearing(collector))
        await self._outcome(channel, asked, timeout_s, collector)
        if asked.done.done() and not collector.flood.done():
            return _verdict(asked.done.result(), collector)
        if channel.ended.done():
            return await self._after_the_end(channel, collector)
        settled = await self._interrupted(channel, asked)
        kept = "it was interrupted" if settled else "it did not heed the interrupt, and its kernel was ended"
        if collector.flood.done():
            most = self._limits.output_hard_bytes
            return flooded(f"it wrote more than {most} bytes; {kept}", state_lost=not settled)
        return overdue(f"it took longer than {timeout_s:g} s; {kept}", state_lost=not settled)

    async def _ask(self, errand: Errand, timeout_s: float) -> str:
        # The answer comes back as a value in the reply: output that is published, a gateway may drop.
        channel = await self._ready_channel()
        request = _request("", silent=True, expressions={"answer": errand.expression})
        asked = await channel.ask("execute_request", request)
        await self._outcome(channel, asked, timeout_s)
        if channel.ended.done():
            raise HostFailureError(channel.ended.result(), state_lost=True)
        if not asked.done.done():
            lost = not await self._interrupted(channel, asked)
            raise HostFailureError(
                f"expected the kernel to see to its files within {timeout_s:g} s", state_lost=lost
            )
        return _value(asked.done.result())

    async def _outcome(
        self, channel: Channel, asked: KernelRequest, timeout_s: float, collector: Collector | None = None
    ) -> None:
        """Wait until a request is done, the connection ends, too much was written, or time is up."""
        ends: set[asyncio.Future[Any]] = {asked.done, channel.ended}
        if collector is not None:
            ends.add(collector.flood)
        await asyncio.wait(ends, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)

    async def _interrupted(self, channel: Channel, asked: KernelRequest) -> bool:
        """Interrupt the kernel; return whether it heeds that, so that its state is kept.

        Raises:
            HostFailureError: The gateway has no such kernel any more, or cannot interrupt it: it was not the code that
                took so long.
        """
        if self._kernel is None:
            return False
        try:
            await self._gateway.interrupt(self._kernel)
        except HostFailureError as failure:
            raise HostFailureError(
                f"{failure}; the code had no end within its time", state_lost=True
            ) from failure
        await self._outcome(channel, asked, self._limits.grace_s + INTERRUPT_ALLOWANCE_S)
        return asked.done.done()

    async def _after_the_end(self, channel: Channel, collector: Collector) -> ExecutionEnd:
        """Return the verdict on code under which the channel ended."""
        why = channel.ended.result()
        if channel.died:
            return killed(f"{why} while the code ran")
        if channel.flooded:
            most = self._limits.output_hard_bytes
            kept = await self._reached_again(channel)
            how = "it was interrupted" if kept else "its kernel was ended"
            return flooded(f"it wrote more than {most} bytes at once; {how}", state_lost=not kept)
        reason = f"{why} while the code ran, and nobody knows how far it got"
        return failed(reason, state_lost=True)

    async def _reached_again(self, ended: Channel) -> bool:
        """Interrupt a kernel that we hung up on, and connect to it again; return whether it answers."""
        if self._kernel is None:
            return False
        try:
            await self._gateway.interrupt(self._kernel)
            await ended.close()
            self._channel = channel = await self._connected(self._kernel)
            asked = await channel.ask("kernel_info_request", {})
        except HostFailureError:
            return False
        await self._outcome(channel, asked, self._limits.grace_s + INTERRUPT_ALLOWANCE_S)
        return asked.done.done()

    async def _ready_channel(self) -> Channel:
        """Return the channel.

        Raises:
            HostFailureError: It ended while nothing ran, or there never was one.
        """
        channel = self._alive()
        if channel is None:
            why = "there is no kernel" if self._channel is None else self._channel.ended.result()
            raise HostFailureError(f"{why} before the code ran", state_lost=True)
        return channel

    def _alive(self) -> Channel | None:
        return self._channel if self._channel is not None and not self._channel.ended.done() else None

    async def _connected(self, kernel: str) -> Channel:
        limits = self._limits
        most = max(2 * (limits.output_hard_bytes + limits.outputs_bytes), 2 * MOST_BYTES)
        return await Channel.open(self._settings, kernel, most)

    async def _let_go(self) -> None:
        """Hang up, and have the kernel deleted meanwhile: one that does not listen takes the gateway seconds."""
        channel, self._channel = self._channel, None
        kernel, self._kernel = self._kernel, None
        if kernel is not None:
            task = asyncio.create_task(self._deleted(kernel))
            self._deletions.add(task)
            task.add_done_callback(self._deletions.discard)
        if channel is not None:
            await channel.close()

    async def _deleted(self, kernel: str) -> None:
        try:
            await self._gateway.delete(kernel)
        except HostFailureError as failure:
            logger.warning("a kernel is left to its gateway: %s", failure)


def _request(code: str, *, silent: bool = False, expressions: dict[str, str] | None = None) -> dict[str, Any]:
    return {
        "code": code,
        "silent": silent,
        "store_history": not silent,
        "user_expressions": expressions or {},
        "allow_stdin": False,
        "stop_on_error": True,
    }


def _hearing(collector: Collector) -> Any:
    def on_message(kind: str, content: Message) -> None:
        if kind == "stream":
            text = str(content.get("text", ""))
            if content.get("name") == "stderr" and text.startswith(RATE_WORDS):
                collector.lost()
            else:
                collector.write(str(content.get("name")), text)
        elif kind in ("display_data", "execute_result") and isinstance(content.get("data"), dict):
            metadata = content.get("metadata")
            collector.show(
                "display_data" if kind == "display_data" else "execute_result",
                content["data"],
                metadata if isinstance(metadata, dict) else {},
            )
        elif kind == "error":
            collector.error = _error(content)

    return on_message


def _verdict(reply: Message, collector: Collector) -> ExecutionEnd:
    if reply.get("status") == "ok":
        payload = reply.get("payload")
        if isinstance(payload, list) and any(
            isinstance(each, dict) and each.get("source") == "ask_exit" and not each.get("keepkernel")
            for each in payload
        ):
            return ExecutionEnd(state_lost=True, reason="the code has asked its kernel to end")
        return ExecutionEnd()
    return raised(collector.error or _error(reply))


def _error(content: Message) -> CodeError:
    lines = content.get("traceback")
    texts = [plain(str(line)) for line in lines] if isinstance(lines, list) else []
    return CodeError(
        ename=plain(str(content.get("ename") or "Exception"))[:200],
        evalue=plain(str(content.get("evalue") or "")),
        traceback=tuple(line for text in texts for line in text.split("\n")),
    )


def _value(reply: Message) -> str:
    """Return the `repr` of what an expression of an errand came to; empty where it came to nothing."""
    try:
        shown = reply["user_expressions"]["answer"]["data"]["text/plain"]
    except (KeyError, TypeError):
        return ""
    return shown if isinstance(shown, str) else ""


class JupyterBackend:
    """Runs code in the kernels of a Jupyter kernel gateway, one a session.

    A gateway isolates nothing: a session's code can do whatever the gateway's user can, to the other sessions' kernels
    and folders too. Time and output are bounded here; memory, disk, processes and network are not. It is for code
    that is trusted, or for gateways that put each kernel into a container of its own.

    Args:
        settings: How the gateway is reached.
    """

    isolation = "remote"

    def __init__(self, settings: JupyterSettings) -> None:
        self._settings = settings
        self._gateway: Gateway | None = None
        self._opened: Opened[JupyterInterpreter] = Opened()

    async def start(self) -> None:
        """Ask the gateway for its kernels, which shows that the token is good.

        Raises:
            SandboxUnavailableError: It does not answer, refuses the token, or has none of the name.
        """
        self._gateway = Gateway(self._settings)
        try:
            await self._gateway.check()
        except HostFailureError as failure:
            await self.close()
            raise SandboxUnavailableError(str(failure)) from failure

    async def open(
        self, limits: Limits, *, packages: tuple[str, ...] = (), snapshot: bool = False
    ) -> JupyterInterpreter:
        """Start a kernel; see `Backend`."""
        refuse_snapshots(snapshot)
        if self._gateway is None:
            raise SandboxUnavailableError(
                "expected a backend that was started, got one that was not, or was closed"
            )
        return await self._opened.add(JupyterInterpreter(self._gateway, self._settings, limits, packages))

    async def close(self) -> None:
        """End all kernels that were opened. Idempotent."""
        await self._opened.close()
        gateway, self._gateway = self._gateway, None
        if gateway is not None:
            await gateway.close()
