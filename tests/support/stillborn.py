"""An app whose process exits while it is loaded."""

import os
import sys

sys.stderr.write("these are its last words\n")
sys.stderr.flush()
os._exit(7)
