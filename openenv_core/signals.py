"""Names of signals."""

import signal


def signal_name(number: int) -> str:
    """Return a signal's name: `SIGKILL` for 9, `signal 62` for one without a name, like most real-time signals."""
    try:
        return signal.Signals(number).name
    except ValueError:  # it has no name
        return f"signal {number}"
