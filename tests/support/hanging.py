"""A counter whose steps never return, and start a non-daemon thread."""

import sys
import threading
import time

from counter import Add, Count, Counter

from servers import create_app


class Hanging(Counter):
    BLOCKING = True

    def step(self, action: Add) -> Count:
        sys.stdout.write("hanging now\n")
        sys.stdout.flush()
        threading.Thread(target=time.sleep, args=(3600,)).start()  # not a daemon: must be waited for
        time.sleep(3600)
        raise AssertionError


app = create_app(Hanging, Add, Count)
