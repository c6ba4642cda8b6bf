"""What becomes of an exception that an environment raised: the operator's log, and the caller's text."""

import logging

from openenv_core.errors import EnvironmentFailure
from openenv_core.protocol.faults import text_of
from openenv_core.tracebacks import authors_part

logger = logging.getLogger("servers")


def reported(error: BaseException, what: str = "the environment raised") -> str:
    """Log an exception of an environment, and return what its caller is told.

    Args:
        error: The exception. One that an environment raises to refuse something is none of the operator's business.
        what: What happened, for the log.
    """
    if isinstance(error, EnvironmentFailure):
        logger.debug("the environment refused: %s", error)
    else:
        traceback = authors_part(error) or error.__traceback__
        logger.error("%s", what, exc_info=(type(error), error, traceback))
    return text_of(error)
