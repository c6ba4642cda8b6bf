"""Sessions of the service as interpreters."""

import asyncio
import base64
import hashlib
import secrets
from typing import Final

from openenv_core.sandbox import FileRefusedError, Limits, SandboxUnavailableError

from ..hosted import Collector, ExecutionEnd, HostedInterpreter, HostFailureError
from ..hosted.errand import MOST_BYTES, Errand
from ..hosted.interpreter import ERRAND_TIMEOUT_S, Opened, flooded, overdue, raised, refuse_snapshots
from .service import (
    NotRun,
    Ran,
    ServiceRefusedError,
    ServiceTimeoutError,
    TogetherService,
    TooLargeError,
    read_answer,
)
from .settings import TogetherSettings

SLACK_BYTES: Final = 1 << 16
PROBE_TIMEOUT_S: Final = 2.0
"""How long the question whether a session or the service is alive is repeated."""


class TogetherInterpreter(HostedInterpreter):
    """Code, session and files through the documented requests.

    The interface has no way to interrupt or to end a session. One whose code takes too long is left behind, for the
    service to end after its time, and the next execution begins another.

    Args:
        service: The service.
        settings: How it is reached.
        limits: Of the session.
        packages: Imported at the start.
    """

    def __init__(
        self, service: TogetherService, settings: TogetherSettings, limits: Limits, packages: tuple[str, ...]
    ) -> None:
        super().__init__(limits, packages, isolation="remote", report_files=settings.report_files)
        self._service = service
        self._theirs: str | None = None
        self._had_stdin = False

    async def _begin(self) -> None:
        self._theirs = None
        self._had_stdin = False
        # Uploads land where code runs, so the workspace is the folder that the session begins in.
        await self._enter(own_folder=False)

    async def _end(self) -> None:
        self._theirs = None

    async def _run(
        self, code: str, collector: Collector, timeout_s: float, stdin: str | None
    ) -> ExecutionEnd:
        if stdin is not None or self._had_stdin:
            await self._ask(Errand("stdin", text=stdin or ""), timeout_s)
            self._had_stdin = stdin is not None
        try:
            ran = await self._sent(code, timeout_s, self._most_bytes(), repeatable=False)
        except ServiceTimeoutError as late:
            await self._require_answers()
            reason = f"{late}; the session was left behind, as there is no way to interrupt it"
            return overdue(reason, state_lost=True)
        except TooLargeError as failure:
            return flooded(str(failure), state_lost=False)
        ran.collect_into(collector)
        if collector.flood.done():
            return flooded(
                f"it wrote more than {self._limits.output_hard_bytes} bytes, and was not stopped",
                state_lost=False,
            )
        return ExecutionEnd() if collector.error is None else raised(collector.error)

    async def _ask(self, errand: Errand, timeout_s: float) -> str:
        ran = await self._sent(errand.statement, timeout_s, MOST_BYTES, repeatable=True)
        return ran.written()

    async def _put(self, path: str, data: bytes) -> None:
        """Upload a file by the documented field, and move it to its place."""
        name = f"upload-{secrets.token_hex(8)}"
        errand = Errand("take", root=self._root, name=name, path=path)
        upload = {"name": name, "encoding": "base64", "content": base64.b64encode(data).decode()}
        ran = await self._sent(
            errand.statement, ERRAND_TIMEOUT_S, MOST_BYTES, repeatable=True, files=(upload,)
        )
        said = errand.read(ran.written())
        if "refused" in said:
            raise FileRefusedError(path, str(said["refused"])[:1000])
        if said.get("sha256") != hashlib.sha256(data).hexdigest():
            raise HostFailureError(
                "expected the service to put a file where its code runs, and it is not there"
            )

    async def _sent(
        self,
        code: str,
        timeout_s: float,
        most_bytes: int,
        *,
        repeatable: bool,
        files: tuple[dict[str, str], ...] = (),
    ) -> Ran:
        try:
            said = await self._service.execute(
                code,
                self._theirs,
                timeout_s=timeout_s,
                most_bytes=most_bytes,
                repeatable=repeatable,
                files=files,
            )
            answer = read_answer(said)
        except ServiceRefusedError as failure:
            answer = NotRun(str(failure))
        if isinstance(answer, NotRun):
            raise HostFailureError(
                f"expected the service to run the code, got: {answer.reason}",
                state_lost=await self._is_gone(),
            )
        if self._theirs is not None and answer.session_id != self._theirs:
            raise HostFailureError("expected the answer of one session, got that of another", state_lost=True)
        self._theirs = answer.session_id
        return answer

    async def _require_answers(self) -> None:
        """Tell code that takes too long from a service that does not answer.

        Raises:
            HostFailureError: It is the service. What became of the session nobody knows.
        """
        try:
            await self._service.sessions(PROBE_TIMEOUT_S)
        except HostFailureError as failure:
            raise HostFailureError(str(failure), state_lost=True) from failure

    async def _is_gone(self) -> bool:
        """Whether the session is not among those that the service has."""
        if self._theirs is None:
            return False
        try:
            return self._theirs not in await self._service.sessions(PROBE_TIMEOUT_S)
        except HostFailureError:
            return False

    def _most_bytes(self) -> int:
        """How long an answer may be: what may be written, some of it spelled with two characters."""
        return 2 * (self._limits.output_hard_bytes + self._limits.outputs_bytes) + SLACK_BYTES


class TogetherBackend:
    """Runs code in sessions of Together's Code Interpreter.

    It speaks the interface as it is documented, and is tested against a server of ours that speaks it too. It has
    never been run against the service itself.

    Time and output are bounded here. Memory, disk, processes and network are what the service grants.

    Args:
        settings: How it is reached.
    """

    isolation = "remote"

    def __init__(self, settings: TogetherSettings) -> None:
        self._settings = settings
        self._service: TogetherService | None = None
        self._opened: Opened[TogetherInterpreter] = Opened()

    async def start(self) -> None:
        """Ask for the list of sessions, which shows that the token is good.

        Raises:
            SandboxUnavailableError: The service does not answer, or refuses the token.
        """
        self._service = TogetherService(self._settings)
        try:
            await self._service.sessions()
        except HostFailureError as failure:
            await self.close()
            raise SandboxUnavailableError(str(failure)) from failure

    async def open(
        self, limits: Limits, *, packages: tuple[str, ...] = (), snapshot: bool = False
    ) -> TogetherInterpreter:
        """Begin a session; see `Backend`."""
        refuse_snapshots(snapshot)
        if self._service is None:
            raise SandboxUnavailableError(
                "expected a backend that was started, got one that was not, or was closed"
            )
        return await self._opened.add(TogetherInterpreter(self._service, self._settings, limits, packages))

    async def close(self) -> None:
        """Let all sessions go; the service ends them after their time. Idempotent."""
        await self._opened.close()
        service, self._service = self._service, None
        if service is not None:
            await asyncio.shield(service.close())
