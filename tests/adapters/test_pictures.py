"""Fields that hold pictures: one array for Gymnasium, for vectors and for clients, one PNG on the wire."""

import base64
import io
import json
from typing import Annotated, Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env
from numpy.typing import NDArray
from picture_world import SIZE, Board, Dot, Move, app
from PIL import Image
from pydantic import ValidationError
from serving import served
from websockets.sync.client import connect

from openenv_core import ConfigurationError, EnvClient, Observation, Picture, State, StepResult
from openenv_core.adapters.episode import TextEpisode, text_of_observation
from openenv_core.adapters.gymnasium import ServedEnv
from openenv_core.adapters.vector import ServedVectorEnv
from openenv_core.play.terminal import observation_lines

FRAMES = spaces.Box(0, 255, (SIZE, SIZE, 3), np.uint8)


class Grey(Observation):
    frame: Annotated[NDArray[np.uint8], Picture(2, 3, 1)]


class DotClient(EnvClient[Move, Board, State]):
    """The client that an author writes."""

    action_type, observation_type, state_type = Move, Board, State


def expected(place: int) -> NDArray[np.uint8]:
    dot = Dot()
    dot.place = place
    return dot.draw()


def png(array: NDArray[np.uint8]) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.filterwarnings("ignore::UserWarning")  # the checker advises to normalise pictures
def test_picture_is_a_box_in_gymnasium_and_in_vectors_and_a_png_on_the_wire() -> None:
    with served(app) as address:
        with ServedEnv(f"http://{address}") as env:
            assert env.observation_space == FRAMES
            check_env(env, skip_render_check=True, skip_close_check=True)
            np.testing.assert_array_equal(env.reset(seed=3)[0], expected(3))
            np.testing.assert_array_equal(env.step(1)[0], expected(4))
        envs = ServedVectorEnv(f"http://{address}", 2)
        assert envs.single_observation_space == FRAMES
        np.testing.assert_array_equal(envs.reset(seed=3)[0], [expected(3), expected(4)])
        np.testing.assert_array_equal(envs.step(np.array([0, 1]))[0], [expected(2), expected(5)])
        envs.close()
        with connect(f"ws://{address}/ws") as socket:  # as a released client, which has no adapters
            socket.send(json.dumps({"type": "reset", "data": {"seed": 3}}))
            frame = json.loads(socket.recv())["data"]["observation"]["frame"]
            np.testing.assert_array_equal(
                np.asarray(Image.open(io.BytesIO(base64.b64decode(frame)))), expected(3)
            )


async def test_clients_get_the_array_and_policies_of_text_a_line() -> None:
    with served(app) as address:
        async with DotClient(f"http://{address}") as client:
            result: StepResult[Board] = await client.reset(seed=7)
            np.testing.assert_array_equal(result.observation.frame, expected(7))
        episode = TextEpisode(f"http://{address}")
        text = await episode.reset(seed=7)
        assert json.loads(text)["frame"].startswith("[a PNG picture, ")
        assert (await episode.call("act", {"to": "left"})).count("PNG picture") == 1
        await episode.close()
    assert text_of_observation(Board(frame=expected(1))).count("PNG picture") == 1
    (line,) = observation_lines(json.loads(Board(frame=expected(1)).model_dump_json(include={"frame"})))
    assert line.startswith("  frame: [a PNG picture, ")


GREY = np.arange(6, dtype=np.uint8).reshape(2, 3, 1)


@pytest.mark.parametrize(
    "given",
    [
        GREY,
        GREY.tobytes(),
        png(GREY[..., 0]),
        base64.b64encode(png(GREY[..., 0])).decode(),
        base64.urlsafe_b64encode(GREY.tobytes()).decode(),
    ],
    ids=["array", "raw", "file", "base64 of a file", "base64 of raw bytes"],
)
def test_field_takes_arrays_files_and_bytes(given: Any) -> None:
    read = Grey(frame=given)
    np.testing.assert_array_equal(read.frame, GREY)
    np.testing.assert_array_equal(Grey.model_validate_json(read.model_dump_json()).frame, GREY)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (np.zeros((2, 3, 1)), r"expected a picture of uint8 \(2, 3, 1\), got float64 .* astype\('uint8'\)"),
        (np.zeros((3, 2, 1), np.uint8), r"expected a picture of uint8 \(2, 3, 1\), got uint8 \(3, 2, 1\)"),
        (b"12345", "expected the file of a picture, or 6 bytes of .*, got 5 bytes"),
        (png(np.zeros((4, 4), np.uint8)), "expected a picture of 3 by 2 pixels, got 4 by 4"),
        (png(GREY[..., 0])[:40], "expected the file of a picture"),
        ("no base64", "base64|padding"),
        ([[1, 2]], "expected a numpy array, or bytes of a picture, got list"),
    ],
)
def test_what_is_no_picture_of_this_size_is_refused(given: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Grey(frame=given)


def test_picture_has_a_size() -> None:
    with pytest.raises(ConfigurationError, match=r"1, 3 or 4 channels, not \(8, 8, 2\)"):
        Picture(8, 8, 2)
