"""What a request to the service can come to, beside an answer."""

from ..hosted import HostFailure


class Overdue(HostFailure):
    """No answer came in time. The code may run on."""


class TooLarge(HostFailure):
    """The answer is larger than anything that may be written."""


class Refused(HostFailure):
    """The service understood, and said no: to a session that is gone, for one."""
