"""Pictures in models: numpy arrays for programs, PNG on the wire, a Box for Gymnasium, an image on the page.

class BoardObservation(Observation):
    frame: Annotated[np.ndarray, Picture(64, 64)]
"""

import base64
import io
import re
from dataclasses import dataclass
from typing import Any, Final

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import PydanticCustomError, core_schema

from openenv_core.errors import ConfigurationError
from openenv_core.protocol.batch import SPACE

PNG: Final = "image/png"

_MODES: Final = {1: "L", 3: "RGB", 4: "RGBA"}
"""Pillow's modes, by the number of channels."""

_ENCODED: Final = re.compile(
    r"(?:data:image/[a-z]+;base64,)?(?P<start>iVBORw0KGgo|/9j/|R0lGOD|UklGR)[\w+/-]{32,}={0,2}", re.ASCII
)
"""Base64 of a picture, of either alphabet, by its first bytes; the page knows pictures by the same (values.js)."""

_FORMATS: Final = {"iVBORw0KGgo": "PNG", "/9j/": "JPEG", "R0lGOD": "GIF", "UklGR": "WebP"}


@dataclass(frozen=True, slots=True)
class Picture:
    """Annotates a model's field that holds a picture.

    The field holds a numpy array, uint8 [height, width, channels]. It also takes the file of a picture (PNG, JPEG, GIF,
    WebP), or the array's C-ordered bytes; both as bytes, or as base64. In JSON it is base64 of a PNG, in batches of
    `ropewalk.v1` the array itself. Gymnasium's adapters see a Box from 0 to 255, the page an image.

    Attributes:
        height: Pixels.
        width: Pixels.
        channels: 1 (grey), 3 (RGB) or 4 (RGBA).

    Raises:
        ConfigurationError: There are no such pictures, or, where a model is defined, numpy or Pillow is missing.
    """

    height: int
    width: int
    channels: int = 3

    def __post_init__(self) -> None:
        if self.channels not in _MODES or min(self.height, self.width) < 1:
            raise ConfigurationError(
                f"a picture has a height and width of at least 1, and 1, 3 or 4 channels, not {self.shape}"
            )

    @property
    def shape(self) -> tuple[int, int, int]:
        """Height, width and channels."""
        return self.height, self.width, self.channels

    def read(self, value: Any) -> Any:
        """Return the picture of any form that a field takes as uint8 [height, width, channels].

        Raises:
            ValueError: The value is no picture, or one of another size or type.
        """
        import numpy as np

        if isinstance(value, str):
            encoded = value.rpartition(",")[2].replace("-", "+").replace("_", "/")
            value = base64.b64decode(encoded, validate=True)
        if isinstance(value, bytes | bytearray | memoryview):
            value = self._read_bytes(bytes(value))
        if not isinstance(value, np.ndarray):
            raise ValueError(f"expected a numpy array, or bytes of a picture, got {type(value).__name__}")
        if value.dtype != np.uint8 or value.shape != self.shape:
            raise ValueError(
                f"expected a picture of uint8 {self.shape}, got {value.dtype} {value.shape}"
                + ("; scale it to 0 to 255 and use astype('uint8')" if value.dtype != np.uint8 else "")
            )
        return value

    def write(self, value: Any) -> str:
        """Return a picture's array as base64 of a PNG."""
        import numpy as np
        from PIL import Image

        array = np.asarray(value, np.uint8)
        buffer = io.BytesIO()
        # Little compression: it takes a tenth of the time of the default.
        Image.fromarray(array[..., 0] if self.channels == 1 else array).save(buffer, "PNG", compress_level=1)
        return base64.b64encode(buffer.getvalue()).decode()

    def _read_bytes(self, data: bytes) -> Any:
        import numpy as np
        from PIL import Image

        size = self.height * self.width * self.channels
        if len(data) == size and not _is_file(data):
            return np.frombuffer(data, np.uint8).reshape(self.shape).copy()
        try:
            # Image.open reads only the header: a picture of another size is never unpacked.
            with Image.open(io.BytesIO(data), formats=tuple(_FORMATS.values())) as picture:
                if picture.size != (self.width, self.height):
                    raise ValueError(
                        f"expected a picture of {self.width} by {self.height} pixels, got {picture.width} by "
                        f"{picture.height}"
                    )
                return np.array(picture.convert(_MODES[self.channels])).reshape(self.shape)
        except (OSError, SyntaxError, Image.DecompressionBombError) as error:  # SyntaxError: a broken PNG
            raise ValueError(
                f"expected the file of a picture, or {size} bytes of {self.shape}, got {len(data)} bytes"
            ) from error

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        try:
            import numpy  # noqa: F401
            from PIL import Image  # noqa: F401
        except ImportError as error:
            raise ConfigurationError(
                f"a field of type Picture needs numpy and Pillow: {error}; pip install numpy pillow"
            ) from error

        def validate(value: Any) -> Any:
            try:
                return self.read(value)
            except ValueError as error:
                raise PydanticCustomError("picture", "{reason}", {"reason": str(error)}) from None

        return core_schema.no_info_plain_validator_function(
            validate,
            serialization=core_schema.plain_serializer_function_ser_schema(
                self.write, return_schema=core_schema.str_schema(), when_used="json"
            ),
        )

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        space = {"type": "Box", "low": 0, "high": 255, "shape": list(self.shape), "dtype": "uint8"}
        return {"type": "string", "contentEncoding": "base64", "contentMediaType": PNG, SPACE: space}


def describe_picture(text: str) -> str | None:
    """Return a line that stands for a picture in base64, for readers of text; None if the text is none."""
    found = _ENCODED.fullmatch(text)
    return found and f"[a {_FORMATS[found['start']]} picture, {3 * len(text) // 4:,} bytes]"


def _is_file(data: bytes) -> bool:
    return data.startswith((b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF8", b"RIFF"))
