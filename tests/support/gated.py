"""An environment whose constructor waits for a test: until somebody writes to the pipe that GATE names."""

import os
import sys

from counter import Add, Count, Counter

from servers import create_app


class Gated(Counter):
    BLOCKING = True

    def __init__(self) -> None:
        super().__init__()
        sys.stdout.write("constructing now\n")
        sys.stdout.flush()
        with open(os.environ["GATE"]) as gate:
            gate.read()


app = create_app(Gated, Add, Count, max_concurrent_envs=4)
