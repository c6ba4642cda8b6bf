"""Frames of `ropewalk.v1`: encoding round-trips, and invalid frames are refused without using memory."""

import json
import tracemalloc
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from openenv_core import Observation
from openenv_core.adapters.spaces import describe_space
from openenv_core.protocol import batch
from openenv_core.protocol.batch import (
    FORMATS,
    Array,
    FrameError,
    columns_of,
    decode_frame,
    encode_frame,
    rows_of,
)

MB = 1 << 20


def made(dtype: str, shape: list[int], seed: int) -> "np.ndarray[Any, Any]":
    bits = np.random.default_rng(seed).integers(0, 2, shape) if dtype == "bool" else seed % 128
    return (np.arange(np.prod(shape)).reshape(shape) % 7 + bits).astype(dtype)


ARRAYS = st.builds(
    made,
    st.sampled_from(sorted(FORMATS)),
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.integers(0, 1 << 20),
)


def array_of(values: "np.ndarray[Any, Any]") -> Array:
    return Array(values.dtype.name, values.shape, np.ascontiguousarray(values).tobytes())


@given(st.lists(ARRAYS, max_size=4), st.text(max_size=9))
def test_encoded_frame_decodes_to_the_same_values(values: list[Any], text: str) -> None:
    frame = encode_frame({"id": b"3", "text": json.dumps(text).encode()}, [array_of(one) for one in values])
    header, arrays = decode_frame(frame)
    assert header == {"id": 3, "text": text}
    for one, other in zip(values, arrays, strict=True):
        assert other.tolist() == one.tolist()
        assert np.frombuffer(other.data, other.dtype).reshape(other.shape).tolist() == one.tolist()
    assert isinstance(frame, bytes) == bool(values)


VALID: Any = encode_frame(
    {"id": b"1"}, [array_of(np.arange(6, dtype=np.int16).reshape(2, 3)), array_of(np.ones(3))]
)


@given(st.data())
def test_corrupted_frame_is_refused_or_read_without_using_memory(data: st.DataObject) -> None:
    broken = bytearray(VALID)
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(broken) - 1))
        match data.draw(st.sampled_from(("byte", "cut", "insert"))):
            case "byte":
                broken[at] = data.draw(st.integers(0, 255))
            case "cut" if at:
                del broken[at:]
            case "insert":
                broken[at:at] = data.draw(st.binary(max_size=9))
    refused_or_small(bytes(broken))


@pytest.mark.parametrize(
    "frame", [VALID + bytes(8), VALID + b"1", '{"id": 1, "x": NaN}', '{"id": 1, "x": -Infinity}']
)
def test_trailing_bytes_and_json_constants_are_refused(frame: str | bytes) -> None:
    with pytest.raises(FrameError):
        decode_frame(frame)


SIZES = st.one_of(st.integers(-2, 9), st.integers(1 << 30, 1 << 70), st.just(True), st.just(1.5), st.none())


@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "dtype": st.sampled_from([*FORMATS, "object", "O", None, ["int8"], "float16"]),
                "shape": st.one_of(st.lists(SIZES, max_size=34), st.none()),
            }
        ),
        max_size=5,
    ),
    st.binary(max_size=200),
)
def test_lying_header_is_refused_without_using_memory(specs: Any, body: bytes) -> None:
    text = json.dumps({"id": 1, "arrays": specs}).encode()
    refused_or_small(len(text).to_bytes(4, "little") + text + bytes(-(4 + len(text)) % 8) + body)


def refused_or_small(frame: bytes) -> None:
    tracemalloc.start()
    try:
        _, arrays = decode_frame(frame)
        for one in arrays:
            rows_of(0, [one], one.shape[0])
    except FrameError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < MB


TREES = st.recursive(
    st.one_of(st.integers(-1, 3), st.booleans(), st.none(), st.text(max_size=2)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=2), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(TREES)
def test_columns_that_name_no_array_are_refused(tree: Any) -> None:
    arrays = [array_of(np.arange(4).reshape(2, 2)), array_of(np.zeros(2)), array_of(np.zeros(3))]
    try:
        rows = rows_of(tree, arrays, 2)
    except ValueError:
        return
    assert len(rows) == 2
    text = json.dumps(tree)
    assert text.count("0") <= 1
    assert text.count("1") <= 1
    assert "2" not in text


def test_array_is_used_once_and_the_total_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    one = array_of(np.zeros((2, 3), np.int8))
    (first, second) = rows_of({"a%": 0, "b": [1]}, [one, one], 2)
    assert json.loads(first) == json.loads(second) == {"a%": [0] * 3, "b": [[0] * 3]}
    with pytest.raises(FrameError, match="of its own"):
        rows_of([0, 0], [one], 2)
    monkeypatch.setattr(batch, "MAX_ITEMS", 15)
    with pytest.raises(FrameError, match="at most 15"):
        rows_of([0, 1], [one, one], 2)


@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(3, start=-1),
        spaces.Box(-1, 1, (2, 2), np.float32),
        spaces.Box(0, 255, (3, 4, 1), np.uint8),
        spaces.MultiDiscrete([[2, 3], [4, 5]]),
        spaces.MultiBinary((2, 2)),
        spaces.Dict(
            {"a": spaces.Discrete(2), "b": spaces.Tuple([spaces.MultiBinary(2), spaces.Discrete(4)])}
        ),
    ],
    ids=str,
)
def test_values_of_a_space_are_columns_even_if_the_environment_changes_them_later(
    space: spaces.Space[Any],
) -> None:
    layout = batch.layout_of(describe_space(space))
    assert layout is not None
    space.seed(1)
    values = [space.sample() for _ in range(5)]

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(one) for key, one in value.items()}
        return [plain(one) for one in value] if isinstance(value, tuple) else value.tolist()

    def overwrite(value: Any) -> None:
        for part in value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else ():
            overwrite(part)
        if isinstance(value, np.ndarray):
            value[...] = 0

    class Seen(Observation):
        value: Any = Field(json_schema_extra={batch.SPACE: describe_space(space)})

    encoder = batch.ObservationEncoder(Seen.model_json_schema())
    expected = [plain(value) for value in values]
    encoded = []
    for value in values:
        observation = Seen(value=value)
        encoded.append(encoder.encode(observation))
        overwrite(value)  # as an environment that keeps its buffer may do in its next step
        observation.value = None
    if space.dtype != np.uint8:  # as which numpy takes no integers of Python's
        assert [encoder.encode(Seen(value=value)) for value in expected] == encoded
    arrays: list[Array] = []
    header, read = decode_frame(encode_frame(encoder.combine(encoded, arrays), arrays))
    assert list(header) == ["columns"]
    assert list(map(json.loads, rows_of(header["columns"]["value"], read, 5))) == expected
    # If one does not fit, all are sent as JSON.
    (mixed,) = map(json.loads, encoder.combine([*encoded, encoder.encode(Seen(value="odd"))], []).values())
    assert [row["value"] for row in mixed] == [*expected, "odd"]


@pytest.mark.parametrize(
    "space",
    [
        spaces.Text(3),
        spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Text(3)}),
        spaces.Box(0, 1, (2, 0), np.float32),
        spaces.Box(0, 1, (2,), np.float16),
        spaces.Sequence(spaces.Discrete(2)),
        spaces.Tuple([]),
        spaces.Dict({}),
    ],
    ids=str,
)
def test_space_without_array_values_has_no_layout(space: spaces.Space[Any]) -> None:
    assert batch.layout_of(describe_space(space)) is None


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        *(("int64", values) for values in ([1.5, 2.0], ["a", "b"], [[1], [2]], [None, 1], [2**70, 1])),
        ("int8", [300, 1]),  # which would be wrapped
    ],
)
def test_values_outside_the_space_are_refused(dtype: str, values: list[Any]) -> None:
    arrays: list[Array] = []
    with pytest.raises((ValueError, TypeError, OverflowError)):
        columns_of(batch.Leaf(dtype, ()), values, arrays)
    assert arrays == []
    columns_of(batch.Leaf("int8", ()), [127, -128], arrays)
    assert arrays[0].data[0].tolist() == [127, -128]


def test_memory_of_large_values_is_used_again_only_once_they_are_released() -> None:
    class Picture(Observation):
        pixels: Any = None

    space = {"type": "Box", "dtype": "uint8", "shape": [64, 64]}
    encoder = batch.ObservationEncoder({"properties": {"pixels": {batch.SPACE: space}}})

    def encode(*values: int) -> list[Any]:
        return [encoder.encode(Picture(pixels=np.full((64, 64), value, np.uint8))) for value in values]

    def places(encoded: list[Any]) -> set[int]:
        return {id(one[3][0][0]) for one in encoded}

    def read(encoded: list[Any]) -> list[int]:
        arrays: list[Any] = []
        encoder.combine(encoded, arrays)
        return [value[0][0] for value in batch.Array("uint8", (2, 64, 64), b"".join(arrays[0].data)).tolist()]

    encode(0)  # shows the dtype of the values
    first, second = encode(1, 2), encode(3, 4)
    assert not places(first) & places(second)
    assert (read(first), read(second)) == ([1, 2], [3, 4])
    encoder.release(first)
    third = encode(5, 6)
    assert places(third) == places(first)
    assert (read(second), read(third)) == ([3, 4], [5, 6])
