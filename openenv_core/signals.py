"""What a signal that has ended a process is called."""

import signal


def signal_name(number: int) -> str:
    """Return `SIGKILL` for 9, and `signal 62` for one without a name, as most real-time signals are."""
    try:
        return signal.Signals(number).name
    except ValueError:  # valid or not
        return f"signal {number}"
