import sys
from pathlib import Path

_HERE = Path(__file__).parent

# `tests/servers` and its neighbours must not be taken for the packages whose names they mirror, so the
# repository comes first; `support` holds the environments that tests serve.
sys.path[:0] = [str(_HERE.parent), str(_HERE / "support")]
