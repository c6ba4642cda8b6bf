"""The dialect `ropewalk.v1`: its frames, and those of them that ask something of many sessions at once.

docs/protocol.md describes it. A frame is a JSON object, its header; where arrays belong to it, a binary frame: the
header's length (uint32), the header, and the arrays one behind the other, each begun at a multiple of 8 bytes.
"""

import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeAlias

from pydantic import ConfigDict, Field, StrictInt, TypeAdapter, ValidationError
from pydantic_core import from_json

from openenv_core.outcomes import was_terminated
from openenv_core.protocol.errors import UNKNOWN_TYPE, VALIDATION_ERROR, RefusalError, faults_of
from openenv_core.protocol.jsonio import dumps
from openenv_core.protocol.replies import encode_fields
from openenv_core.protocol.requests import RequestHead, RequestId, ResetOptions
from openenv_core.types import Observation

SUBPROTOCOL: Final = "ropewalk.v1"

RESUME: Final = "resume"
"""Key of the query that names the session which a connection is to resume: who passes connections on heeds it."""

SNAPSHOT: Final = "snapshot"
"""Likewise of the snapshot in whose state a connection is to open its sessions."""

MAX_MEMBERS: Final = 1024
"""Sessions of one connection."""

MAX_ITEMS: Final = 1 << 21
"""Numbers, and lists around them, that the arrays of one request may hold."""

MAX_DIMENSIONS: Final = 32

MAX_ID_CHARS: Final = 64
"""Of a snapshot."""

SPACE: Final = "gymnasium_space"
"""The key of a field's JSON schema that holds the space of its values."""

FORMATS: Final = {
    "bool": "?",
    "int8": "b",
    "uint8": "B",
    "int16": "h",
    "uint16": "H",
    "int32": "i",
    "uint32": "I",
    "int64": "q",
    "uint64": "Q",
    "float32": "f",
    "float64": "d",
}
"""The types that arrays may have, with the codes that `struct` has for them."""

_LARGE_BYTES: Final = 4096
"""Of one value: copying it costs more than looking at it."""

_LENGTH: Final = struct.Struct("<I")
_ALIGNMENT: Final = 8


class FrameError(ValueError):
    """A frame whose bytes do not fit together."""


class Array(NamedTuple):
    """An array in a frame: C-ordered, little-endian. To be written, its data may be a list of parts."""

    dtype: str
    shape: tuple[int, ...]
    data: Any

    def tolist(self) -> list[Any]:
        """Return it as nested lists of Python's numbers."""
        flat = memoryview(self.data)
        return flat.cast(FORMATS[self.dtype], self.shape).tolist()  # type: ignore[call-overload, no-any-return]


def encode_frame(header: Mapping[str, bytes], arrays: Sequence[Array]) -> str | bytes:
    """Write a frame, as text where it has no arrays.

    Args:
        header: Its keys with their values as JSON.
        arrays: What the header counts from 0.
    """
    parts = [b'"%b":%b' % (name.encode(), value) for name, value in header.items()]
    if not arrays:
        return (b"{%b}" % b",".join(parts)).decode()
    specs = [{"dtype": array.dtype, "shape": array.shape} for array in arrays]
    text = b"{%b}" % b",".join([*parts, b'"arrays":' + dumps(specs)])
    pieces: list[Any] = [_LENGTH.pack(len(text)), text, bytes(-(_LENGTH.size + len(text)) % _ALIGNMENT)]
    for array in arrays:
        pieces += array.data if isinstance(array.data, list) else (array.data,)
        pieces.append(bytes(-_size(array.dtype, array.shape) % _ALIGNMENT))
    return b"".join(pieces)


def decode_frame(frame: str | bytes | bytearray) -> tuple[dict[str, Any], list[Array]]:
    """Read a frame: its header, without the key `arrays`, and the arrays. Nothing is copied.

    Raises:
        FrameError: It is none.
    """
    body = memoryview(b"")
    text: str | bytes | bytearray = frame
    if not isinstance(frame, str):
        if len(frame) < _LENGTH.size:
            raise FrameError(f"expected a binary frame of at least {_LENGTH.size} bytes, got {len(frame)}")
        end = _LENGTH.size + _LENGTH.unpack_from(frame)[0]
        if end > len(frame):
            raise FrameError(f"expected a header that ends within {len(frame)} bytes, got one of {end}")
        text = frame[_LENGTH.size : end]
        body = memoryview(frame)[end + -end % _ALIGNMENT :]
    try:
        header = from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise FrameError(f"expected a JSON object, got text that does not parse: {error}") from None
    if not isinstance(header, dict):
        raise FrameError(f"expected a JSON object, got {type(header).__name__}")
    return header, list(_arrays(header.pop("arrays", ()), body))


def _arrays(specs: Any, body: memoryview) -> Iterator[Array]:
    if not isinstance(specs, list | tuple):
        raise FrameError("expected arrays as a list of objects with dtype and shape")
    at = 0
    for spec in specs:
        dtype, shape = (spec.get("dtype"), spec.get("shape")) if isinstance(spec, dict) else (None, None)
        if not isinstance(dtype, str) or dtype not in FORMATS:
            raise FrameError(f"expected arrays with a dtype of {', '.join(FORMATS)}, got another")
        if not isinstance(shape, list) or not 0 < len(shape) <= MAX_DIMENSIONS:
            raise FrameError(f"expected arrays of 1 to {MAX_DIMENSIONS} dimensions, got another")
        if not all(type(size) is int and 0 < size <= len(body) for size in shape):
            raise FrameError(f"expected sizes of an array from 1 to the {len(body)} bytes that follow")
        end = at + _size(dtype, shape)
        if end > len(body):
            raise FrameError(
                f"expected an array that ends within {len(body)} bytes, got one that ends at {end}"
            )
        yield Array(dtype, tuple(shape), body[at:end])
        at = end + -end % _ALIGNMENT
    if at < len(body):
        raise FrameError(f"expected the frame to end with its last array, got {len(body) - at} bytes more")


def _size(dtype: str, shape: Sequence[int]) -> int:
    return math.prod(shape) * struct.calcsize(FORMATS[dtype])


# What requests ask

_Members: TypeAlias = Annotated[
    list[Annotated[StrictInt, Field(ge=0)]], Field(min_length=1, max_length=MAX_MEMBERS)
]


_Count: TypeAlias = Annotated[StrictInt, Field(ge=1, le=MAX_MEMBERS)]
_SnapshotId: TypeAlias = Annotated[str, Field(max_length=MAX_ID_CHARS)]


class OpenRequest(RequestHead):
    """Open sessions: all, or none.

    Attributes:
        snapshot: The id of one, in whose state they begin.
        lease_s: Seconds that they are to outlive a connection that breaks.
        wait_s: Seconds that they may wait in the queue of a full server; by default as long as that allows.
    """

    op: Literal["open"]
    count: _Count = 1
    snapshot: _SnapshotId | None = None
    lease_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    wait_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None


class ResumeRequest(RequestHead):
    """Go on with the sessions of a connection that has broken.

    Attributes:
        session: What `open` was answered with.
        secret: Likewise.
        read: How many frames the client has read.
    """

    op: Literal["resume"]
    session: str
    secret: str
    read: RequestId


class CancelRequest(RequestHead):
    """Do not begin a request that waits.

    Attributes:
        request: Its id.
    """

    op: Literal["cancel"]
    request: RequestId


class MembersRequest(RequestHead):
    """What is asked of many sessions.

    Attributes:
        members: Whom it is about; all, where it does not say.
    """

    members: _Members | None = None


class _OfOneRequest(RequestHead):
    """A request about one member."""

    member: Annotated[StrictInt, Field(ge=0)]


class ForkRequest(_OfOneRequest):
    """Open sessions in the state of a member: all, or none."""

    op: Literal["fork"]
    count: _Count


class SnapshotRequest(_OfOneRequest):
    """Keep the state of a member, to open sessions in it later."""

    op: Literal["snapshot"]


class CloseRequest(MembersRequest):
    """End sessions, and drop snapshots.

    Attributes:
        members: Of the sessions; none, where it does not say.
        snapshots: Ids of snapshots.
    """

    op: Literal["close"]
    snapshots: list[_SnapshotId] = Field(default_factory=list, max_length=MAX_MEMBERS)


class ResetRequest(MembersRequest):
    """Start episodes.

    Attributes:
        seeds: One a member.
        options: Of each reset.
        at_least: Answer once so many are through, and again; by default once all are.
    """

    op: Literal["reset"]
    seeds: list[Annotated[StrictInt, Field(ge=0, lt=2**64)] | None] | None = None
    options: ResetOptions | None = None
    at_least: Annotated[StrictInt, Field(ge=1)] | None = None


class StepRequest(MembersRequest):
    """Take actions.

    Attributes:
        actions: The fields of an action a member; or fields of columns, in which numbers stand for arrays.
        autoreset: What becomes of a member whose episode is over: it is reset by its next step, or by the same.
        at_least: As of a reset.
    """

    op: Literal["step"]
    actions: list[Any] | dict[str, Any]
    autoreset: Literal["next_step", "same_step"] | None = None
    at_least: Annotated[StrictInt, Field(ge=1)] | None = None


class StateRequest(MembersRequest):
    """Read states."""

    op: Literal["state"]


BatchRequest: TypeAlias = ResetRequest | StepRequest | StateRequest
Request: TypeAlias = (
    OpenRequest | ResumeRequest | CancelRequest | BatchRequest | ForkRequest | SnapshotRequest | CloseRequest
)
OPERATIONS: Final = ("open", "resume", "cancel", "reset", "step", "state", "fork", "snapshot", "close")
LEFT_IN_PRODUCTION: Final = OPERATIONS[:3]
_read: Final = TypeAdapter[Request](
    Annotated[Request, Field(discriminator="op")], config=ConfigDict(defer_build=True)
).validate_python


def read_request(header: dict[str, Any], size: int, operations: Sequence[str] = OPERATIONS) -> Request:
    """Read the header of a request, in a frame of this size. RefusalError: UNKNOWN_TYPE or VALIDATION_ERROR."""
    if header.get("op") not in operations:
        raise RefusalError(
            UNKNOWN_TYPE,
            f"expected op to be one of {', '.join(operations)}, got {str(header.get('op'))[:100]!r}",
        )
    try:
        return _read(header)
    except ValidationError as error:
        raise RefusalError(VALIDATION_ERROR, "Invalid message", {"errors": faults_of(error, size)}) from None


def rows_of(columns: Any, arrays: Sequence[Array], members: int) -> list[bytes]:
    """Return what columns hold, a row a member, as JSON.

    Raises:
        FrameError: A number stands for no array, or for one that is used already; one is of another length, or all
            together hold too much.
    """
    unused = dict(enumerate(arrays))
    left = MAX_ITEMS

    def rows(tree: Any) -> list[bytes]:
        nonlocal left
        if type(tree) is int:
            array = unused.pop(tree, None)
            if array is None or array.shape[0] != members:
                raise FrameError(f"expected {tree} to stand for an array of {members} rows of its own")
            left -= sum(math.prod(array.shape[: depth + 1]) for depth in range(len(array.shape)))
            if left < 0:
                raise FrameError(f"expected arrays of at most {MAX_ITEMS} numbers and lists around them")
            values = array.tolist()
            return list(map(dumps, values)) if array.shape[1:] else dumps(values)[1:-1].split(b",")
        if isinstance(tree, dict) and tree:
            row = b"{%b}" % b",".join(dumps(name).replace(b"%", b"%%") + b":%b" for name in tree)
            return [row % parts for parts in zip(*map(rows, tree.values()), strict=True)]
        if isinstance(tree, list) and tree:
            return [b"[%b]" % b",".join(parts) for parts in zip(*map(rows, tree), strict=True)]
        raise FrameError(
            f"expected columns as numbers of arrays, in objects and lists, got {str(tree)[:100]}"
        )

    return rows(columns)


# What holds the values of a space


class Leaf(NamedTuple):
    """An array for each value of a space."""

    dtype: str
    shape: tuple[int, ...]


Layout: TypeAlias = Leaf | dict[str, Any] | list[Any]
"""A leaf, or an object or a list of layouts."""


def layout_of(space: Mapping[str, Any]) -> Layout | None:
    """Return the arrays that the values of a space are, as its JSON schema describes it; None where they are none."""
    leaf: Leaf | None = None
    match space:
        case {"type": "Box", "dtype": str(dtype), "shape": list(shape)}:
            leaf = Leaf(dtype, tuple(shape))
        case {"type": "Discrete", "dtype": str(dtype)}:
            leaf = Leaf(dtype, ())
        case {"type": "MultiDiscrete", "dtype": str(dtype), "nvec": list(nvec)}:
            leaf = Leaf(dtype, _shape_of(nvec))
        case {"type": "MultiBinary", "n": int(n)}:
            leaf = Leaf("int8", (n,))
        case {"type": "MultiBinary", "n": list(shape)}:
            leaf = Leaf("int8", tuple(shape))
        case {"type": "Dict", "spaces": dict(spaces)}:
            named = {name: layout_of(part) for name, part in spaces.items()}
            return (
                None
                if None in named.values()
                else {name: part for name, part in named.items() if part} or None
            )
        case {"type": "Tuple", "spaces": list(spaces)}:
            parts = [layout_of(part) for part in spaces]
            return None if None in parts else [part for part in parts if part] or None
    return leaf if leaf and leaf.dtype in FORMATS and all(leaf.shape) else None


def _shape_of(nested: Any) -> tuple[int, ...]:
    return (len(nested), *_shape_of(nested[0])) if isinstance(nested, list) else ()


def stack(layout: Layout, values: Sequence[Any]) -> Any:
    """Return values, one a member, as a tree that has all members in each leaf."""
    if isinstance(layout, Leaf):
        return values
    if isinstance(layout, dict):
        return {name: stack(part, [value[name] for value in values]) for name, part in layout.items()}
    return [stack(part, [value[place] for value in values]) for place, part in enumerate(layout)]


def columns_of(layout: Layout, batch: Any, arrays: list[Array]) -> Any:
    """Return the columns for a tree that `stack` returns, or that has arrays for leaves; their arrays are appended.

    Raises:
        ValueError: It holds no values of this layout. What was appended is to be taken away.
    """
    if isinstance(layout, dict):
        return {name: columns_of(part, batch[name], arrays) for name, part in layout.items()}
    if isinstance(layout, list):
        return [columns_of(part, one, arrays) for part, one in zip(layout, batch, strict=True)]
    import numpy as np

    wire = np.dtype(layout.dtype).newbyteorder("<")
    # What is large is copied once, into the frame.
    apart = isinstance(batch, list) and getattr(batch[0], "nbytes", 0) >= _LARGE_BYTES
    parts = [np.asarray(one) for one in (batch if apart else [batch])]
    for found in parts:
        shape = found.shape if apart else found.shape[1:]
        if shape != layout.shape or (found.dtype != wire and not np.can_cast(found.dtype, wire, "same_kind")):
            raise ValueError(f"expected values of {layout.dtype} {layout.shape}, got {found.dtype} {shape}")
    data = [np.ascontiguousarray(found, wire) for found in parts]
    arrays.append(Array(layout.dtype, (len(batch), *layout.shape), data))
    return len(arrays) - 1


# What answers


_BESIDE: Final = frozenset({"reward", "done"})


_AT_TIMES: Final = ("metadata", "info", "infrastructure_error", "unscored")
"""Fields of an observation that mostly say nothing: a row is sent where one does, or where there are others."""


@lru_cache(maxsize=256)
def _fields_of(model: type[Observation]) -> tuple[frozenset[str], Sequence[Callable[[Observation], Any]]]:
    """Return the fields that always say something, and what gets each of those that do at times."""
    sent = {name for name, field in model.model_fields.items() if field.exclude is not True}
    at_times = [attrgetter(name) for name in _AT_TIMES if name in model.model_fields]
    return frozenset(sent - _BESIDE - {*_AT_TIMES}), at_times


def _have_further_fields(observations: Sequence[Observation], encoded: set[str]) -> bool:
    """Whether observations have values in fields beside those that are encoded already."""
    models = {*map(type, observations)}
    for model in models:
        always, at_times = _fields_of(model)
        of_model = observations
        if len(models) > 1:
            of_model = [observation for observation in observations if type(observation) is model]
        if always - encoded or any(any(map(field, of_model)) for field in at_times):
            return True
    return False


class ObservationEncoder:
    """Writes the observations of many members: as columns where they are arrays, as JSON else.

    Args:
        schemas: JSON schemas of the observations.
    """

    def __init__(self, *schemas: Mapping[str, Any]) -> None:
        self._layouts: dict[str, Layout] = {}
        for schema in schemas:
            for name, part in schema.get("properties", {}).items():
                if (layout := layout_of(part.get(SPACE, {}))) is not None:
                    self._layouts[name] = layout

    def encode(self, observations: Sequence[Observation], arrays: list[Array]) -> dict[str, bytes]:
        """Return the keys `columns` and `rows`; arrays are appended.

        Raises:
            ValueError: One holds what JSON cannot.
            TypeError: Likewise.
        """
        columns: dict[str, Any] = {}
        for name, layout in self._layouts.items():
            begun = len(arrays)
            try:
                batch = stack(layout, list(map(attrgetter(name), observations)))
                columns[name] = columns_of(layout, batch, arrays)
            except (ImportError, AttributeError, LookupError, TypeError, ValueError, OverflowError):
                del arrays[begun:]  # it has other values than it says, which JSON can tell
        header = {"columns": dumps(columns)} if columns else {}
        exclude = {*_BESIDE, *columns}
        if _have_further_fields(observations, exclude):
            rows = [encode_fields(one, exclude)[0] for one in observations]
            header["rows"] = b"[%b]" % b",".join(rows)
        return header


def ends_of(observation: Observation) -> tuple[bool, bool]:
    """Return whether an episode has terminated, and whether it was truncated."""
    if not observation.done:
        return False, False
    truncated = observation.truncated is True
    return not truncated or was_terminated(observation), truncated
