"""Interrupts itself while it uses a client: `interrupted_client.py URL HOW`, with the URL of a counter.

waiting: Ctrl-C while a call waits. often: a hundred times at any moment. It prints what came of it.
"""

import asyncio
import os
import random
import signal
import sys
import threading

from openenv_core import GenericEnvClient, SyncEnvClient

INTERRUPTIONS = 100
MAX_UNANSWERED = 16


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def waiting(env: SyncEnvClient) -> str:
    """Interrupt a call that waits for ever."""
    env.reset(seed=1)

    async def forever() -> None:
        interrupt()
        await asyncio.sleep(3600)

    try:
        env._client._run(forever)
    except KeyboardInterrupt:
        return f"interrupted, then {env.reset(seed=3).observation['total']}"
    return "not interrupted"


def interrupted_often(env: SyncEnvClient) -> str:
    """Interrupt resets at random moments; each reply must belong to its own request."""
    env.connect()
    over = threading.Event()
    armed = False
    unanswered = 0

    def interrupt_often() -> None:
        pauses = random.Random(7)
        while not over.wait(pauses.random() * 0.004):
            interrupt()

    def interrupted_once(*_: object) -> None:
        nonlocal armed, unanswered
        # Only in the midst of the block below, and not again before that has ended. A server that lacks a core may
        # leave many requests unanswered, which a client limits.
        if armed and unanswered < MAX_UNANSWERED:
            armed = False
            unanswered += 1
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupted_once)
    thread = threading.Thread(target=interrupt_often, daemon=True)
    thread.start()
    interrupted = number = 0
    wrong = []
    while interrupted < INTERRUPTIONS:
        try:
            armed = True
            while True:
                number += 1
                total = env.reset(seed=number).observation["total"]
                unanswered = 0
                if total != number:
                    wrong.append((number, total))
        except KeyboardInterrupt:
            interrupted += 1
    over.set()
    thread.join()
    return f"{interrupted} interrupted, wrong {wrong}, then {env.reset(seed=5).observation['total']}"


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with GenericEnvClient(sys.argv[1]).sync() as client:
        result = {"waiting": waiting, "often": interrupted_often}[sys.argv[2]](client)
    print(result)  # noqa: T201
