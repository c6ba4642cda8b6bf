"""A counter that is not loaded while the file named by LATE_WHILE exists."""

import os
import time

from solo import app as app

WAIT_TIMEOUT_S = 30.0

_deadline = time.monotonic() + WAIT_TIMEOUT_S
while os.path.exists(os.environ["LATE_WHILE"]):
    assert time.monotonic() < _deadline, "expected the file to be removed by now"
    time.sleep(0.01)
