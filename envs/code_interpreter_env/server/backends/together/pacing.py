"""When a request is sent again."""

import random
import time
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Final

FIRST_PAUSE_S: Final = 0.25
LAST_PAUSE_S: Final = 8.0


class Pacing:
    """The pauses between the attempts of one request: doubled each time, and never shorter than asked for.

    Args:
        patience_s: Seconds for all attempts but the last.
    """

    def __init__(self, patience_s: float) -> None:
        self._deadline = time.monotonic() + patience_s
        self.attempts = 1

    def next_pause_s(self, retry_after: str | None) -> float | None:
        """Return how long to wait before the next attempt; None where there is no time for one.

        Args:
            retry_after: What the service says, in seconds or as a date.
        """
        pause_s = min(LAST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(self.attempts - 1, 16))
        pause_s *= random.uniform(
            0.75, 1.0
        )  # so that those who were refused together do not come back together
        pause_s = max(pause_s, seconds_of(retry_after))
        if time.monotonic() + pause_s > self._deadline:
            return None
        self.attempts += 1
        return pause_s


def seconds_of(retry_after: str | None) -> float:
    """Return the seconds that a Retry-After asks for; 0 where it cannot be read."""
    text = (retry_after or "").strip()
    if text.isascii() and text.replace(".", "", 1).isdigit() and len(text) < 12:
        return float(text)
    try:
        when = parsedate_to_datetime(text)
    except (ValueError, TypeError):
        return 0.0
    return max(0.0, (when - datetime.now(UTC if when.tzinfo else None)).total_seconds())
