"""An environment that shows all kinds of values, including text that would be harmful as markup."""

import base64
import struct
import zlib
from typing import Any, Literal

from openenv_core import Action, Environment, Observation, State
from servers import create_app

HOSTILE = '<img src=x onerror="document.title=1"><script>document.title=1</script></div><!--'


def png(width: int, height: int) -> str:
    """Return a grey PNG in base64."""
    rows = b"".join(b"\0" + bytes(range(width)) for _ in range(height))
    parts = ((b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)), (b"IDAT", zlib.compress(rows)))
    chunks = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in (*parts, (b"IEND", b""))
    ]
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(chunks)).decode()


class Show(Action):
    kind: Literal["hostile", "table", "picture", "pixels", "numbers", "fault"]
    amount: int = 1
    where: tuple[int, ...] = ()


class Shown(Observation):
    text: str = "Choose what to see."
    value: Any = None


class Gallery(Environment[Show, Shown, State]):
    """Shows values."""

    BLOCKING = False
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(
        self,
        *,
        seed: int | None = None,
        episode_id: str | None = None,
        hall: Literal["east", "west"] = "east",
    ) -> Shown:
        self.steps = 0
        return Shown(text=f"The {hall} hall, seed {seed}.")

    def step(self, action: Show) -> Shown:
        self.steps += 1
        values: dict[str, Any] = {
            "hostile": {HOSTILE: [HOSTILE, {"html": HOSTILE, "svg": "data:image/svg+xml;base64,PHN2Zz4="}]},
            "table": [{"name": "a", "size": 1}, {"name": HOSTILE, "size": 2}],
            "picture": {"text/plain": "no", "image/png": png(40, 20).replace("+", "-").replace("/", "_")},
            "numbers": [*range(200_000)],
            "pixels": [[[x, y, 9] for x in range(16)] for y in range(12)],
        }
        if action.kind == "fault":
            raise RuntimeError(HOSTILE)
        text = HOSTILE if action.kind == "hostile" else action.kind
        return Shown(text=text, value=values[action.kind], reward=0.5 * action.amount)

    @property
    def state(self) -> State:
        return State(step_count=self.steps)


app = create_app(Gallery, Show, Shown, env_name="gallery", max_concurrent_envs=2)
