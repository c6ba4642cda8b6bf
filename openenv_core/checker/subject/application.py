"""The application under test, imported into this process."""

from openenv_core.apps import LoadedApp, load_app
from openenv_core.checker.deadline import Overran, within
from openenv_core.checker.outcomes import CheckFailed, NotApplicable
from openenv_core.errors import ConfigurationError


def imported(text: str, seconds: float) -> LoadedApp | CheckFailed | NotApplicable:
    """Import an application; return what became of it where that cannot be done.

    Args:
        text: Stands for it.
        seconds: That the import may take.
    """
    try:
        return within(seconds, lambda: load_app(text), "openenv-import")
    except ConfigurationError as error:
        return NotApplicable(str(error))
    except Overran:
        return CheckFailed(
            f"expected to import {text} within {seconds:g} s, got no end",
            change="do the work in the environment's constructor or reset, not while the module is imported",
        )
    except BaseException as error:  # anybody's code
        if isinstance(error, KeyboardInterrupt):
            raise
        return CheckFailed(
            f"expected to import {text}, got {type(error).__name__}: {error}",
            change="make the application importable: `ropewalk serve` with the same target shows the traceback",
        )
