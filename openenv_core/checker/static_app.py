"""Whether the application can be had at all."""

from openenv_core.checker.check import Level, check
from openenv_core.checker.subject import Subject


@check(Level.STATIC)
def check_app_importable(subject: Subject) -> None:
    """The application can be imported and starts."""
    assert subject.app.served.models
