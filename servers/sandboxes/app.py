"""The sandbox service as an ASGI application: E2B's control API and its access control."""

import asyncio
import base64
import hashlib
import hmac
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from datetime import datetime
from typing import Annotated, Any, Final, TypeVar
from urllib.parse import parse_qsl, unquote

from pydantic import AfterValidator, BaseModel, Field, StringConstraints, ValidationError
from pydantic.alias_generators import to_camel
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from openenv_core.errors import ConfigurationError, OpenEnvError, describe_faults
from servers.sandboxes import envd, interpreter
from servers.sandboxes.guest import ApiError
from servers.sandboxes.ports import OURS, PATH, Ports
from servers.sandboxes.table import MIB, Record, SandboxLimits, SandboxTable
from servers.security import Guard, HttpRefusalError, Tokens
from servers.settings import MAKE_TOKEN, ServerSettings

ENVD_VERSION: Final = "0.6.1"
"""The version reported to clients: later ones have file metadata and entries in events, which not every sandbox
supports."""

DEFAULT_TIMEOUT_S: Final = 300
DEFAULT_FORK_TIMEOUT_S: Final = 15
MAX_PAGE: Final = 100
_HOST: Final = re.compile(r"(?P<port>\d{1,5})-(?P<id>[0-9a-f]{20})\.")

ModelT = TypeVar("ModelT", bound=BaseModel)
Text = Annotated[str, StringConstraints(max_length=32_768, pattern=r"^[^\x00]*$")]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Body(BaseModel, alias_generator=to_camel):
    """A request's body; unknown fields are ignored, since clients of any version may connect."""


def _refuse_given(value: Any) -> Any:
    if value:
        raise ValueError("this service does not have it; leave it out")
    return value


def _require_memory(value: bool | None) -> bool | None:
    if value is False:
        raise ValueError("the memory is always kept; this service has no modes 'filesystem' and 'reboot'")
    return value


Unsupported = Annotated[Any, AfterValidator(_refuse_given)]
"""Refused, not ignored, since the caller relies on it."""

Memory = Annotated[bool | None, AfterValidator(_require_memory)]


class _NewSandbox(_Body):
    template: Annotated[str, StringConstraints(max_length=512)] = Field(alias="templateID")
    timeout: Seconds = DEFAULT_TIMEOUT_S
    metadata: Annotated[dict[Text, Text], Field(max_length=256)] = {}
    env_vars: Annotated[dict[Text, Text], Field(max_length=256, repr=False)] = {}
    auto_pause: bool = False
    auto_pause_memory: Memory = None
    allow_internet_access: bool | None = Field(None, alias="allow_internet_access")
    mcp: Unsupported = None
    network: Unsupported = None
    iam: Unsupported = None
    volume_mounts: Unsupported = None


class _Change(_Body):
    """A requested change of a sandbox: its timeout, a pause, a snapshot."""

    timeout: Seconds = DEFAULT_TIMEOUT_S
    memory: Memory = True
    name: Text | None = None


class _Fork(_Change):
    timeout: Seconds = DEFAULT_FORK_TIMEOUT_S
    count: Annotated[int, Field(ge=1, le=20)] = 1


class SandboxApp(Starlette):
    """The application. Its control API needs a key, a sandbox's commands and files that sandbox's token.

    The service's own /health needs neither; a connection to a port inside a sandbox needs only the sandbox's id.

    Raises:
        ConfigurationError: The settings have no token.
    """

    def __init__(self, settings: ServerSettings, limits: SandboxLimits, *, domain: str | None = None) -> None:
        if not settings.tokens:
            raise ConfigurationError(
                "no token is set, and clients of a sandbox service can run any code; give "
                f"--token-file or ROPEWALK_TOKENS (make one with: {MAKE_TOKEN})"
            )
        self.table = SandboxTable(limits)
        self._tokens = Tokens(settings.tokens)
        self._domain = domain
        self._drain_s = settings.drain_s
        self._ports = Ports(self.table)
        sandbox_path = "/sandboxes/{id}"
        routes = [
            Route(path, act, methods=[method])
            for method, path, act in (
                ("GET", "/health", self._health),
                ("POST", "/sandboxes", self._create),
                ("POST", "/v2/sandboxes", self._create),
                ("GET", "/v2/sandboxes", self._list),
                ("GET", sandbox_path, self._get),
                ("DELETE", sandbox_path, self._end),
                ("POST", sandbox_path + "/timeout", self._set_timeout),
                ("POST", sandbox_path + "/connect", self._connect),
                ("POST", "/v2" + sandbox_path + "/connect", self._connect),
                ("POST", sandbox_path + "/resume", self._connect),
                ("POST", sandbox_path + "/pause", self._pause),
                ("POST", sandbox_path + "/fork", self._fork),
                ("POST", sandbox_path + "/snapshots", self._snapshot),
                ("GET", "/snapshots", self._list_snapshots),
                ("DELETE", "/templates/{id}", self._end),
            )
        ]
        routes += [*envd.routes(self.sandbox_of), *interpreter.routes(self.sandbox_of, self.table)]
        super().__init__(routes=routes, lifespan=self._lifespan)
        self.add_exception_handler(ApiError, _on_api_error)
        self.add_exception_handler(OpenEnvError, _on_failure)
        self.add_exception_handler(404, _on_unknown_path)
        # This application checks X-API-Key and the sandboxes' tokens; the guard checks hosts, origins and bodies.
        self._guard = Guard(self._serve, replace(settings, tokens=()), streamed=self._leaves_body_unread)

    async def drain(self, deadline_s: float | None = None) -> None:
        """End every sandbox."""
        await self._ports.close()
        await self.table.close(self._drain_s if deadline_s is None else deadline_s)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection, or the application's lifespan."""
        if scope["type"] == "lifespan":
            await super().__call__(scope, receive, send)
        else:
            await self._guard(scope, receive, send)

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        await self.table.start()
        try:
            yield
        finally:
            await self.drain()

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if await self._ports.serve(scope, receive, send, *_parse_address(scope)):
            return
        await super().__call__(scope, receive, send)

    def sandbox_of(self, request: Request) -> Record:
        """Return the sandbox that a request is for, after checking its token.

        Raises:
            ApiError: There is no such sandbox (502, as from E2B's proxy), or the token is not its own.
        """
        name = _parse_address(request.scope)[0]
        query = request.query_params
        if name is None and "signature" in query:
            # A signed link to a file names no sandbox; it belongs to the sandbox whose token signed it.
            name = next((each.id for each in self.table.records() if _has_signature(request, each)), None)
        record = self.table.find(name or "")
        if record is None or record.paused:
            raise ApiError(502, f"The sandbox {name!r} was not found")
        token = request.headers.get("x-access-token") or request.headers.get("e2b-traffic-access-token") or ""
        if not hmac.compare_digest(token.encode(), record.token.encode()) and not _has_signature(
            request, record
        ):
            raise ApiError(401, "the header X-Access-Token does not have the sandbox's own token")
        return record

    def _leaves_body_unread(self, scope: Scope) -> bool:
        """Whether the guard must not read a body: it is read as a stream, or its request is refused without it."""
        sandbox, port = _parse_address(scope)
        if sandbox is not None and port is not None and port not in OURS:  # forwarded whole
            return self.table.find(sandbox) is None
        if scope["path"] in envd.STREAMED:
            return True
        for check in (self._owner, self.sandbox_of):
            with suppress(ApiError):
                check(Request(scope))
                return False
        return True

    def _owner(self, request: Request) -> str:
        key = request.headers.get("x-api-key")
        try:
            return self._tokens.principal([] if key is None else [b"Bearer " + key.encode()])
        except HttpRefusalError:
            given = "none" if key is None else "one that it does not know"
            raise ApiError(401, f"expected one of this service's keys in X-API-Key, got {given}") from None

    def _find_record(self, request: Request) -> Record:
        name = request.path_params["id"]
        snapshots = request.url.path.startswith("/templates/")
        record = self.table.find(name, self._owner(request), snapshots=snapshots)
        if record is None:
            kind = "Snapshot" if snapshots else "Sandbox"
            raise ApiError(404, f"{kind} {name!r} was not found: it has ended, or never was")
        return record

    async def _health(self, request: Request) -> Response:
        if _parse_address(request.scope)[0] is not None:
            self.sandbox_of(request)
            return Response(status_code=204)
        return JSONResponse({"status": "healthy"})

    async def _create(self, request: Request) -> Response:
        owner, body = self._owner(request), await _read(request, _NewSandbox)
        record = await self.table.create(
            owner,
            body.template,
            body.timeout,
            body.env_vars,
            metadata=body.metadata,
            pauses=body.auto_pause,
            allow_internet=body.allow_internet_access is not False,
        )
        return JSONResponse(self._to_details(record), 201)

    async def _list(self, request: Request) -> Response:
        owner, query = self._owner(request), request.query_params
        metadata = {unquote(key): unquote(value) for key, value in parse_qsl(query.get("metadata", ""))}
        states = {state for each in query.getlist("state") for state in each.split(",")}
        try:
            after = query.get("startedAfter")
            since = None if after is None else datetime.fromisoformat(after).astimezone()
        except ValueError as error:
            raise ApiError(400, f"expected a time, got: {error}") from None
        records = [
            each
            for each in self.table.records(owner)
            if metadata.items() <= each.metadata.items()
            and (not states or _state(each) in states)
            and (since is None or each.started_at >= since)
            and query.get("template", each.template) == each.template
        ]
        if query.get("order") == "desc":
            records.reverse()
        return _page(request, [self._to_json(each) for each in records])

    async def _get(self, request: Request) -> Response:
        return JSONResponse(self._to_details(self._find_record(request)))

    async def _end(self, request: Request) -> Response:
        await asyncio.shield(self.table.end(self._find_record(request)))
        return Response(status_code=204)

    async def _set_timeout(self, request: Request) -> Response:
        record, body = self._find_record(request), await _read(request, _Change)
        self.table.set_timeout(record, body.timeout)
        return Response(status_code=204)

    async def _connect(self, request: Request) -> Response:
        record, body = self._find_record(request), await _read(request, _Change)
        self.table.set_timeout(record, body.timeout, only_longer=True)
        await self.table.freeze(record, frozen=False)
        return JSONResponse(self._to_details(record))

    async def _pause(self, request: Request) -> Response:
        record, _ = self._find_record(request), await _read(request, _Change)
        if record.paused:
            raise ApiError(409, f"Sandbox {record.id} is paused already")
        await self.table.freeze(record, frozen=True)
        return Response(status_code=204)

    async def _fork(self, request: Request) -> Response:
        record, body = self._find_record(request), await _read(request, _Fork)
        results: list[dict[str, Any]] = []
        for _ in range(body.count):
            try:
                results.append({"sandbox": self._to_details(await self.table.fork(record, body.timeout))})
            except ApiError as error:
                if not results:
                    raise
                results.append({"error": {"code": error.status, "message": str(error)}})
        return JSONResponse(results, 201)

    async def _snapshot(self, request: Request) -> Response:
        record, body = self._find_record(request), await _read(request, _Change)
        names = () if body.name is None else (body.name,)
        snapshot = await self.table.fork(record, 0, snapshot_of=record.id, names=names)
        return JSONResponse({"snapshotID": snapshot.id, "names": names}, 201)

    async def _list_snapshots(self, request: Request) -> Response:
        query = request.query_params
        rows = [
            {"snapshotID": each.id, "names": each.names}
            for each in self.table.records(self._owner(request), snapshots=True)
            if query.get("sandboxID", each.snapshot_of) == each.snapshot_of
            and ("name" not in query or query["name"] in each.names)
        ]
        return _page(request, rows)

    def _to_json(self, record: Record) -> dict[str, Any]:
        """Return a sandbox as an entry of a list."""
        assert record.machine is not None
        return {
            "sandboxID": record.id,
            "templateID": record.template,
            "clientID": "ropewalk",
            "envdVersion": ENVD_VERSION,
            "isolation": record.machine.isolation,
            "metadata": record.metadata,
            "startedAt": record.started_at.isoformat(),
            "endAt": record.end_at.isoformat(),
            "state": _state(record),
            "cpuCount": max(1, round(record.machine.cpus)),
            "memoryMB": record.machine.memory_bytes // MIB,
            "diskSizeMB": self.table.limits.disk_bytes // MIB,
            "lifecycle": {"onTimeout": "pause" if record.pauses else "kill", "autoResume": False},
            "allowInternetAccess": record.allow_internet,
            "domain": self._domain,
        }

    def _to_details(self, record: Record) -> dict[str, Any]:
        """Return a sandbox with its tokens, as it is created, connected to or asked for."""
        tokens = {"envdAccessToken": record.token, "trafficAccessToken": record.token}
        return {**self._to_json(record), **tokens}


def _page(request: Request, rows: list[dict[str, Any]]) -> Response:
    query = request.query_params
    try:
        limit = max(1, min(int(query.get("limit", MAX_PAGE)), MAX_PAGE))
        offset = max(0, int(query.get("nextToken") or 0))
    except ValueError as error:
        raise ApiError(400, f"expected a limit and a token of a page, got: {error}") from None
    headers = {"x-next-token": str(offset + limit)} if offset + limit < len(rows) else {}
    return JSONResponse(rows[offset : offset + limit], headers=headers)


def _state(record: Record) -> str:
    return "paused" if record.paused else "running"


def _parse_address(scope: Scope) -> tuple[str | None, int | None]:
    """Return the sandbox and port that a request names in its path, headers or host name."""
    if match := PATH.fullmatch(scope["path"]):
        return match[1], int(match[2])
    headers = dict(scope["headers"])
    name, port = headers.get(b"e2b-sandbox-id"), headers.get(b"e2b-sandbox-port", b"")
    if name is None and (match := _HOST.match(headers.get(b"host", b"").decode("latin-1"))):
        return match["id"], int(match["port"])
    number = int(port) if port.isdigit() and len(port) < 6 else None
    return (None if name is None else name.decode("latin-1")), number


def _has_signature(request: Request, record: Record) -> bool:
    """Whether a link to a file is validly signed with the sandbox's token."""
    query = request.query_params
    expires = query.get("signature_expiration")
    if request.url.path != "/files" or "signature" not in query:
        return False
    operation = "read" if request.method == "GET" else "write"
    parts = [query.get("path", ""), operation, query.get("username", ""), record.token]
    if expires is not None:
        if not expires.isdecimal() or len(expires) > 11 or int(expires) < time.time():
            return False
        parts.append(expires)
    digest = hashlib.sha256(":".join(parts).encode()).digest()
    unpadded = base64.b64encode(digest).rstrip(b"=")
    return hmac.compare_digest(unpadded, query["signature"].removeprefix("v1_").encode())


async def _read(request: Request, model: type[ModelT]) -> ModelT:
    """Parse the body, whose size the guard has limited."""
    try:
        return model.model_validate_json(await request.body() or b"{}")
    except ValidationError as error:
        faults = describe_faults(error, "body")
        raise ApiError(400, f"expected a body as E2B's API has it, got: {faults}"[:4000]) from None


async def _on_api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    code = error.status if error.code == "unavailable" else error.code
    headers = {"Retry-After": "1"} if error.status == 503 else {"Should-Retry": "false"}
    return JSONResponse({"code": code, "message": str(error)}, error.status, headers)


async def _on_failure(request: Request, error: Exception) -> Response:
    """Answer an error of the sandboxes' backend, such as a container engine that does not respond."""
    return await _on_api_error(request, ApiError(503, f"{type(error).__name__}: {error}"))


async def _on_unknown_path(request: Request, _: Exception) -> Response:
    return await _on_api_error(
        request, ApiError(404, f"expected a path of E2B's API, got {request.url.path!r}")
    )
