"""The lines of a host, read by a thread that may outlive the loop they are for."""

import asyncio
import os
import threading

from servers.mcp.wire import MAX_READ_AHEAD, Lines


def reader() -> threading.Thread:
    (found,) = (thread for thread in threading.enumerate() if thread.name == "lines of MCP")
    return found


def test_lines_that_come_when_the_loop_has_ended_harm_nobody() -> None:
    reading, writing = os.pipe()

    async def begin() -> Lines:
        return Lines(reading, 100)

    lines = asyncio.run(begin())
    thread = reader()
    os.write(writing, b"{}\n")
    os.close(writing)
    thread.join(10)  # what it raises would fail the test
    assert not thread.is_alive()
    lines._file.close()


async def test_lines_are_read_ahead_up_to_a_bound_and_in_order() -> None:
    reading, writing = os.pipe()
    lines = Lines(reading, 100)
    thread = reader()
    sent = [f"{number}\n" for number in range(3 * MAX_READ_AHEAD)]
    os.write(writing, "".join(sent).encode())
    os.close(writing)
    seen = []
    async for line in lines:
        assert lines._lines.qsize() <= MAX_READ_AHEAD
        seen.append(line)
    assert seen == sent
    thread.join(10)
    lines._file.close()
