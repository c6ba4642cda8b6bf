"""Frames of the dialect `ropewalk.v1`, with requests about many sessions at once (docs/protocol.md).

A text frame is a JSON object, its header. A frame with arrays is binary: the header's length (uint32), the header,
and the arrays one after another, each aligned to 8 bytes.
"""

import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeAlias

from pydantic import ConfigDict, Field, StrictInt, TypeAdapter, ValidationError
from pydantic_core import from_json

from openenv_core.outcomes import outcome_of
from openenv_core.protocol.errors import INVALID_JSON, UNKNOWN_TYPE, RefusalError, faults_of, invalid_message
from openenv_core.protocol.frames import (
    RequestDecoder,
    RequestHead,
    RequestId,
    ResetOptions,
    encode_fields,
    require_observation,
)
from openenv_core.protocol.jsonio import dumps
from openenv_core.types import Observation

SUBPROTOCOL: Final = "ropewalk.v1"

RESUME: Final = "resume"
"""Query key of the session to resume on a connection; forwarders of connections route by it."""

SNAPSHOT: Final = "snapshot"
"""Query key, likewise, of the snapshot from which a connection opens its sessions."""

MAX_MEMBERS: Final = 1024
"""Most sessions of one connection."""

MAX_ITEMS: Final = 1 << 21
"""Most numbers, plus the lists around them, in the arrays of one request."""

MAX_DIMENSIONS: Final = 32

MAX_ID_CHARS: Final = 64
"""Longest id of a snapshot."""

SPACE: Final = "gymnasium_space"
"""Key in a field's JSON schema that describes the Gymnasium space of its values."""

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
"""Dtypes of arrays, with their `struct` codes."""

_LARGE_VALUE_BYTES: Final = 4096
"""Size of a value from which memory for it is used again: the allocator would return it, and map each page anew."""

_SPARE_BYTES: Final = 64 << 20
"""How much of such memory is kept for each leaf of a space."""

_LENGTH: Final = struct.Struct("<I")
_DOUBLE: Final = struct.Struct("<d")
_ALIGNMENT: Final = 8


class FrameError(ValueError):
    """A malformed frame."""


class Array(NamedTuple):
    """An array in a frame: C-ordered, little-endian. Its data may be a list of parts when it is encoded."""

    dtype: str
    shape: tuple[int, ...]
    data: Any

    def tolist(self) -> list[Any]:
        """Return the array as nested lists of Python numbers."""
        flat = memoryview(self.data)
        return flat.cast(FORMATS[self.dtype], self.shape).tolist()  # type: ignore[call-overload, no-any-return]


def encode_frame(header: Mapping[str, bytes], arrays: Sequence[Array]) -> str | bytes:
    """Encode a frame; as text if it has no arrays.

    Args:
        header: Header fields, with their values as JSON.
        arrays: Arrays of the frame; header fields refer to them by index.
    """
    parts = [b'"%b":%b' % (name.encode(), value) for name, value in header.items()]
    if not arrays:
        return (b"{%b}" % b",".join(parts)).decode()
    specs = [{"dtype": array.dtype, "shape": array.shape} for array in arrays]
    text = b"{%b}" % b",".join([*parts, b'"arrays":' + dumps(specs)])
    pieces: list[Any] = [_LENGTH.pack(len(text)), text, bytes(-(_LENGTH.size + len(text)) % _ALIGNMENT)]
    for array in arrays:
        pieces += array.data if isinstance(array.data, list) else (array.data,)
        pieces.append(bytes(-_byte_size(array.dtype, array.shape) % _ALIGNMENT))
    return b"".join(pieces)


def encode_reply(
    request_id: int | None, fields: Mapping[str, bytes], arrays: Sequence[Array] = (), *, last: bool = True
) -> str | bytes:
    """Encode a reply to a request for several sessions, or to one that opens, ends or copies sessions.

    Args:
        request_id: The request's id; None if it could not be read.
        fields: Further header fields, with their values as JSON.
        arrays: As of `encode_frame`.
        last: Whether no further reply to the request follows.
    """
    return encode_frame({"id": dumps(request_id), **fields, "last": dumps(last)}, arrays)


def read_frame(
    frame: str | bytes, decoder: RequestDecoder[Any], operations: Sequence[str]
) -> tuple[RequestHead, Any, list[Array]]:
    """Return a request's head, its message of the released dialect if it has one, and its arrays.

    Args:
        frame: The frame of a client.
        decoder: Decodes the frames of the released dialect, which have an id here.
        operations: The operations that are served.

    Raises:
        RefusalError: It is not a valid request.
        Exception: Whatever the author's validators raised.
    """
    try:
        header, arrays = decode_frame(frame)
    except FrameError as error:
        raise RefusalError(INVALID_JSON, str(error)) from None
    if isinstance(frame, str) and "op" not in header:
        return *decoder.numbered_frame(frame), []
    return read_request(header, len(frame), operations), None, arrays


def read_request_id(frame: str | bytes) -> tuple[int | None, bool]:
    """Return the id of an invalid request, if readable, and whether it is in the released dialect (has a `type`)."""
    try:
        header, _ = decode_frame(frame)
    except FrameError:
        return None, False
    request_id = header.get("id")
    if type(request_id) is int and 0 <= request_id < 2**53:
        return request_id, "type" in header
    return None, False


def decode_frame(frame: str | bytes | bytearray) -> tuple[dict[str, Any], list[Array]]:
    """Return a frame's header, without the key `arrays`, and its arrays, whose data are not copied.

    Raises:
        FrameError: The frame is malformed.
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
    return header, list(_read_arrays(header.pop("arrays", ()), body))


def _read_arrays(specs: Any, body: memoryview) -> Iterator[Array]:
    if not isinstance(specs, list | tuple):
        raise FrameError("expected arrays as a list of objects with dtype and shape")
    offset = 0
    for spec in specs:
        dtype, shape = (spec.get("dtype"), spec.get("shape")) if isinstance(spec, dict) else (None, None)
        if not isinstance(dtype, str) or dtype not in FORMATS:
            raise FrameError(f"expected arrays with a dtype of {', '.join(FORMATS)}, got another")
        if not isinstance(shape, list) or not 0 < len(shape) <= MAX_DIMENSIONS:
            raise FrameError(f"expected arrays of 1 to {MAX_DIMENSIONS} dimensions, got another")
        if not all(type(size) is int and 0 < size <= len(body) for size in shape):
            raise FrameError(f"expected sizes of an array from 1 to the {len(body)} bytes that follow")
        end = offset + _byte_size(dtype, shape)
        if end > len(body):
            raise FrameError(
                f"expected an array that ends within {len(body)} bytes, got one that ends at {end}"
            )
        yield Array(dtype, tuple(shape), body[offset:end])
        offset = end + -end % _ALIGNMENT
    if offset < len(body):
        raise FrameError(
            f"expected the frame to end with its last array, got {len(body) - offset} bytes more"
        )


def _byte_size(dtype: str, shape: Sequence[int]) -> int:
    return math.prod(shape) * struct.calcsize(FORMATS[dtype])


# Requests

_Members: TypeAlias = Annotated[
    list[Annotated[StrictInt, Field(ge=0)]], Field(min_length=1, max_length=MAX_MEMBERS)
]


_Count: TypeAlias = Annotated[StrictInt, Field(ge=1, le=MAX_MEMBERS)]
_SnapshotId: TypeAlias = Annotated[str, Field(max_length=MAX_ID_CHARS)]


class OpenRequest(RequestHead):
    """Open sessions, all or none.

    Attributes:
        count: Number of sessions.
        snapshot: Id of the snapshot whose state they start in, if any.
        lease_s: Seconds for which they outlive a broken connection; None: not at all.
        wait_s: Seconds they may wait in the queue of a full server; None: as long as the server allows.
    """

    op: Literal["open"]
    count: _Count = 1
    snapshot: _SnapshotId | None = None
    lease_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    wait_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None


class ResumeRequest(RequestHead):
    """Resume the sessions of a broken connection.

    Attributes:
        session: The session's id in the reply to `open`.
        secret: The secret in that reply.
        read: Number of frames the client has read.
    """

    op: Literal["resume"]
    session: str
    secret: str
    read: RequestId


class CancelRequest(RequestHead):
    """Cancel a request that has not begun.

    Attributes:
        request: Id of the request.
    """

    op: Literal["cancel"]
    request: RequestId


class MembersRequest(RequestHead):
    """A request about many sessions.

    Attributes:
        members: Numbers of the sessions; None: all.
    """

    members: _Members | None = None


class _MemberRequest(RequestHead):
    """A request about one member."""

    member: Annotated[StrictInt, Field(ge=0)]


class ForkRequest(_MemberRequest):
    """Open sessions in the state of a member, all or none."""

    op: Literal["fork"]
    count: _Count


class SnapshotRequest(_MemberRequest):
    """Keep the state of a member, for sessions opened from it later."""

    op: Literal["snapshot"]


class CloseRequest(MembersRequest):
    """End sessions, and drop snapshots.

    Attributes:
        members: Numbers of the sessions to end; None: none.
        snapshots: Ids of the snapshots to drop.
    """

    op: Literal["close"]
    snapshots: list[_SnapshotId] = Field(default_factory=list, max_length=MAX_MEMBERS)


class ResetRequest(MembersRequest):
    """Start episodes.

    Attributes:
        seeds: A seed for each member.
        options: Options of every reset.
        at_least: Reply whenever this many have completed; None: once all have.
    """

    op: Literal["reset"]
    seeds: list[Annotated[StrictInt, Field(ge=0, lt=2**64)] | None] | None = None
    options: ResetOptions | None = None
    at_least: Annotated[StrictInt, Field(ge=1)] | None = None


class StepRequest(MembersRequest):
    """Take actions.

    Attributes:
        actions: The fields of an action for each member; or columns by field, in which numbers are indices of arrays.
        autoreset: When a member whose episode is over is reset: by its next step, or by the same.
        at_least: As in `ResetRequest`.
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
PRODUCTION_OPERATIONS: Final = OPERATIONS[:3]
_validate: Final = TypeAdapter[Request](
    Annotated[Request, Field(discriminator="op")], config=ConfigDict(defer_build=True)
).validate_python


def read_request(header: dict[str, Any], size: int, operations: Sequence[str] = OPERATIONS) -> Request:
    """Validate the header of a request; `size` is that of its frame. RefusalError: UNKNOWN_TYPE, VALIDATION_ERROR."""
    if header.get("op") not in operations:
        raise RefusalError(
            UNKNOWN_TYPE,
            f"expected op to be one of {', '.join(operations)}, got {str(header.get('op'))[:100]!r}",
        )
    try:
        return _validate(header)
    except ValidationError as error:
        raise invalid_message(faults_of(error, size)) from None


def rows_of(columns: Any, arrays: Sequence[Array], members: int) -> list[bytes]:
    """Return the values of columns as JSON rows, one for each member.

    Raises:
        FrameError: A number refers to no array, or to one already used; an array has the wrong length, or all
            together are too large.
    """
    unused_arrays = dict(enumerate(arrays))
    remaining = MAX_ITEMS

    def rows(tree: Any) -> list[bytes]:
        nonlocal remaining
        if type(tree) is int:
            array = unused_arrays.pop(tree, None)
            if array is None or array.shape[0] != members:
                raise FrameError(f"expected {tree} to stand for an array of {members} rows of its own")
            remaining -= sum(math.prod(array.shape[: depth + 1]) for depth in range(len(array.shape)))
            if remaining < 0:
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


# Columns of a space's values


class Leaf(NamedTuple):
    """A space whose values are arrays of this dtype and shape."""

    dtype: str
    shape: tuple[int, ...]


Layout: TypeAlias = Leaf | dict[str, Any] | list[Any]
"""A leaf, or a dict or list of layouts."""


def layout_of(space: Mapping[str, Any]) -> Layout | None:
    """Return the layout of a space, given as in a JSON schema; None if its values are not arrays."""
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
            layouts = {name: layout_of(part) for name, part in spaces.items()}
            return (
                None
                if None in layouts.values()
                else {name: part for name, part in layouts.items() if part} or None
            )
        case {"type": "Tuple", "spaces": list(spaces)}:
            parts = [layout_of(part) for part in spaces]
            return None if None in parts else [part for part in parts if part] or None
    return leaf if leaf and leaf.dtype in FORMATS and all(leaf.shape) else None


def _shape_of(nested: Any) -> tuple[int, ...]:
    return (len(nested), *_shape_of(nested[0])) if isinstance(nested, list) else ()


def columns_of(layout: Layout, batch: Any, arrays: list[Array]) -> Any:
    """Return the columns of a tree of arrays, whose rows are values for each member; append them to `arrays`.

    Raises:
        ValueError: A value does not fit the layout. The caller removes arrays appended so far.
    """
    if isinstance(layout, dict):
        return {name: columns_of(part, batch[name], arrays) for name, part in layout.items()}
    if isinstance(layout, list):
        return [columns_of(part, one, arrays) for part, one in zip(layout, batch, strict=True)]
    import numpy as np

    dtype = np.dtype(layout.dtype).newbyteorder("<")
    array = np.asarray(batch)
    if array.shape[1:] != layout.shape or (
        array.dtype != dtype and not np.can_cast(array.dtype, dtype, "same_kind")
    ):
        raise ValueError(
            f"expected values of {layout.dtype} {layout.shape}, got {array.dtype} {array.shape[1:]}"
        )
    data = np.ascontiguousarray(array, dtype)
    if dtype.kind in "iu" and array.dtype != dtype and not np.array_equal(array, data):
        raise ValueError(f"expected values that {layout.dtype} can hold, got larger or smaller ones")
    arrays.append(Array(layout.dtype, (len(batch), *layout.shape), [data]))
    return len(arrays) - 1


# Replies


_LIFTED: Final = frozenset({"reward", "done"})


_OPTIONAL_FIELDS: Final = frozenset({"metadata", "info", "infrastructure_error", "unscored"})
"""Fields of an observation that are mostly empty; rows are sent only if one is set, or other fields need them."""

_EMPTY_ROW: Final = b'{"metadata":{}}'


EncodedObservation: TypeAlias = tuple[bytes, bool, bool, list[list[Any] | None], bytes | None]
"""An observation, encoded for a reply about many members; no later change of the observation reaches it.

The reward as float64, NaN if there is none; whether the episode has terminated, and was truncated; for each field
that may be a column its data by leaf, or None if it is part of the row; and the row, None if it is empty.
"""


class _LeafEncoder:
    """Encodes the values of a leaf one by one."""

    def __init__(self, leaf: Leaf) -> None:
        self.leaf = leaf
        size = _byte_size(*leaf)
        self.is_large = size >= _LARGE_VALUE_BYTES
        self._max_spare = _SPARE_BYTES // max(1, size)
        self._spare: list[Any] = []
        self._dtype: Any = self  # numpy's, once a value has it
        self._list_size = leaf.shape[0] if len(leaf.shape) == 1 else None
        is_packed = len(leaf.shape) <= 1 and leaf.dtype != "bool"  # for which struct takes any value
        self._pack = (
            struct.Struct(f"<{self._list_size or 1}{FORMATS[leaf.dtype]}").pack if is_packed else None
        )

    def encode(self, value: Any) -> Any:
        """Return a value's data, as bytes or a numpy array; an exception if it does not fit, as of `columns_of`."""
        # The usual values first: all at once are faster, but another call may have changed them by then.
        if getattr(value, "dtype", None) is self._dtype and value.shape == self.leaf.shape:
            if not self.is_large:
                return value.tobytes()
            try:
                copied = self._spare.pop()
            except IndexError:
                return value.copy(order="C")
            copied[...] = value
            return copied
        kind = type(value)
        if self._pack is not None and (len(value) if kind is list else None) == self._list_size:
            try:
                if kind is list:
                    return self._pack(*value)
                if kind is int or kind is float:
                    return self._pack(value)
            except (struct.error, OverflowError, TypeError):
                pass
        arrays: list[Array] = []
        columns_of(self.leaf, [value], arrays)
        data = arrays[0].data[0]
        if getattr(value, "dtype", None) == data.dtype:
            self._dtype = value.dtype
        return data.tobytes()

    def release(self, data: Any) -> None:
        """Use the memory of a large value again."""
        if type(data) is not bytes and len(self._spare) < self._max_spare:
            self._spare.append(data)

    def decode(self, data: Any) -> Any:
        """Return the value with these data, with lists for arrays."""
        return Array(self.leaf.dtype, (1, *self.leaf.shape), bytes(data)).tolist()[0]


def _map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: _map_leaves(function, part) for name, part in tree.items()}
    if isinstance(tree, list):
        return [_map_leaves(function, part) for part in tree]
    return function(tree)


class _Column:
    """A field whose values are arrays.

    Attributes:
        leaves: Encoders of its leaves, in order.
    """

    def __init__(self, layout: Layout) -> None:
        self.leaves: list[_LeafEncoder] = []
        self._tree = _map_leaves(self._add_leaf, layout)

    def _add_leaf(self, leaf: Leaf) -> _LeafEncoder:
        self.leaves.append(_LeafEncoder(leaf))
        return self.leaves[-1]

    def encode(self, value: Any) -> list[Any] | None:
        """Return the data of a value's leaves; None if it does not fit the layout."""
        try:
            data: list[Any] = []
            self._append_leaves(self._tree, value, data)
            return data
        except (ImportError, AttributeError, LookupError, TypeError, ValueError, OverflowError):
            return None

    def numbers(self, first: int) -> Any:
        """Return the layout with the numbers of its leaves' arrays, which count from `first`."""
        number = count(first)
        return _map_leaves(lambda _: next(number), self._tree)

    def decode(self, data: Sequence[Any]) -> Any:
        """Return the value whose leaves have these data, with lists for arrays."""
        rest = iter(data)
        return _map_leaves(lambda leaf: leaf.decode(next(rest)), self._tree)

    def _append_leaves(self, tree: Any, value: Any, data: list[Any]) -> None:
        if isinstance(tree, _LeafEncoder):
            data.append(tree.encode(value))
            return
        for key, part in tree.items() if isinstance(tree, dict) else enumerate(tree):
            self._append_leaves(part, value[key], data)


class ObservationEncoder:
    """Encodes the observations of many members: array fields as columns, the others as JSON rows.

    Args:
        schemas: JSON schemas of the observations.
    """

    def __init__(self, *schemas: Mapping[str, Any]) -> None:
        self._columns: dict[str, _Column] = {}
        for schema in schemas:
            for name, part in schema.get("properties", {}).items():
                if (layout := layout_of(part.get(SPACE, {}))) is not None:
                    self._columns[name] = _Column(layout)
        self._encoders = [(name, column.encode) for name, column in self._columns.items()]
        self._large = [
            (index, column)
            for index, column in enumerate(self._columns.values())
            if any(leaf.is_large for leaf in column.leaves)
        ]
        self._models: dict[type[Observation], tuple[bool, bool]] = {}

    def encode(self, observation: Observation) -> EncodedObservation:
        """Encode an observation, which may change afterwards.

        Raises:
            ValueError: It holds a value that JSON cannot represent.
            TypeError: Likewise, or it is not an Observation.
        """
        known = self._models.get(type(observation))
        needs_row, has_info = self._read_model(require_observation(observation)) if known is None else known
        columns = [encode(getattr(observation, name, None)) for name, encode in self._encoders]
        row = None
        if (
            needs_row
            or None in columns
            or observation.metadata
            or observation.unscored
            or observation.infrastructure_error
            or (has_info and observation.info)  # type: ignore[attr-defined]
        ):
            encoded = [name for name, data in zip(self._columns, columns, strict=True) if data is not None]
            row = encode_fields(observation, {*_LIFTED, *encoded})[0]
        reward = observation.reward
        terminated, truncated = ends_of(observation) if observation.done else (False, False)
        return _DOUBLE.pack(math.nan if reward is None else reward), terminated, truncated, columns, row

    def _read_model(self, observation: Observation) -> tuple[bool, bool]:
        """Return whether observations of the same model always have a row, and whether they have a field `info`."""
        model = type(observation)
        sent = {name for name, field in model.model_fields.items() if field.exclude is not True}
        needs_row = bool(sent - _LIFTED - _OPTIONAL_FIELDS - self._columns.keys())
        self._models[model] = answer = needs_row, "info" in model.model_fields
        return answer

    def combine(self, observations: Sequence[EncodedObservation], arrays: list[Array]) -> dict[str, bytes]:
        """Return the header fields `columns` and `rows`, each if it is not empty; append arrays to `arrays`."""
        columns: dict[str, Any] = {}
        as_json: list[tuple[int, str, _Column]] = []
        for index, (name, column) in enumerate(self._columns.items()):
            values = [one[3][index] for one in observations]
            if None in values:
                as_json.append((index, name, column))
                continue
            columns[name] = column.numbers(len(arrays))
            for place, encoder in enumerate(column.leaves):
                dtype, shape = encoder.leaf
                arrays.append(Array(dtype, (len(values), *shape), [value[place] for value in values]))  # type: ignore[index]
        header = {"columns": dumps(columns)} if columns else {}
        if as_json or any(one[4] for one in observations):
            header["rows"] = b"[%b]" % b",".join(_row_of(one, as_json) for one in observations)
        return header

    def release(self, observations: Sequence[EncodedObservation]) -> None:
        """Use the memory of observations again, which nobody will read any more."""
        for index, column in self._large:
            for one in observations:
                for leaf, data in zip(column.leaves, one[3][index] or (), strict=False):
                    leaf.release(data)


def _row_of(observation: EncodedObservation, as_json: Sequence[tuple[int, str, _Column]]) -> bytes:
    """Return an observation's row, with those of its columns that others do not have."""
    *_, columns, row = observation
    row = _EMPTY_ROW if row is None else row
    added = {
        name: column.decode(data) for index, name, column in as_json if (data := columns[index]) is not None
    }
    return dumps({**from_json(row), **added}) if added else row


def ends_of(observation: Observation) -> tuple[bool, bool]:
    """Return whether an episode has terminated, and whether it was truncated, by its last observation."""
    if not observation.done:
        return False, False
    if observation.truncated is not True:
        return True, False
    return outcome_of(observation).terminated, True
