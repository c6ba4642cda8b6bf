"""For comparison: the floor's echo on a WebSocket server below ASGI that parses frames in compiled code.

Run as `python -m benchmarks.wire.below_asgi PORT`.
"""

import asyncio
import sys

import orjson
from picows import WSFrame, WSListener, WSMsgType, WSTransport, WSUpgradeRequest, ws_create_server


class Echo(WSListener):
    """One connection."""

    def on_ws_connected(self, transport: WSTransport) -> None:
        """Set the count to 0."""
        self._step = 0

    def on_ws_frame(self, transport: WSTransport, frame: WSFrame) -> None:
        """Answer one request."""
        if frame.msg_type == WSMsgType.CLOSE:
            transport.disconnect()
            return
        request = orjson.loads(frame.get_payload_as_memoryview())
        if request["type"] == "reset":
            self._step, reward, echoed = 0, None, "ready"
        else:
            self._step, reward, echoed = self._step + 1, 1.0, request["data"]["message"]
        observation = {"metadata": {}, "echoed": echoed, "step": self._step}
        data = {"observation": observation, "reward": reward, "done": False}
        transport.send(WSMsgType.TEXT, orjson.dumps({"type": "observation", "data": data}))


async def _main(port: int) -> None:
    def listener(_: WSUpgradeRequest) -> Echo:
        return Echo()

    server = await ws_create_server(listener, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1])))
