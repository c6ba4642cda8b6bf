"""An app whose import never ends, so that its server is never healthy."""

import time

time.sleep(600)
