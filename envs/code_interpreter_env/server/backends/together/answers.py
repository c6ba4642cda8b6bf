"""What the service answers to an execution, read into our own words."""

import json
from dataclasses import dataclass
from typing import Any

from ..hosted import Collector, HostFailure
from ..hosted.verdict import error_of


@dataclass(frozen=True, slots=True)
class Ran:
    """An execution that took place.

    Attributes:
        session_id: Where.
        outputs: What it wrote and showed, and the exception that ended it, as documented.
    """

    session_id: str
    outputs: tuple[tuple[str, Any], ...]

    def told(self, collector: Collector) -> None:
        """Have a collector hear it. Types of output that are not documented are left out."""
        for kind, data in self.outputs:
            if kind in ("stdout", "stderr"):
                collector.write(kind, str(data))
            elif kind == "error":
                collector.error = error_of(data if isinstance(data, str) else json.dumps(data))
            elif (kind == "display_data" or kind == "execute_result") and isinstance(data, dict):
                collector.show("display_data" if kind == "display_data" else "execute_result", data, {})
            else:
                collector.lost()

    def written(self) -> str:
        """Return all that was written to stdout."""
        return "".join(str(data) for kind, data in self.outputs if kind == "stdout")


@dataclass(frozen=True, slots=True)
class NotRun:
    """An execution that the service could not have take place: `data` is null, `errors` says why."""

    reason: str


def read_answer(said: Any) -> Ran | NotRun:
    """Read the JSON of an answer.

    Raises:
        HostFailure: It is not of the documented form.
    """
    try:
        data, errors = said.get("data"), said.get("errors")
        if data is None and errors:
            texts = [each if isinstance(each, str) else json.dumps(each) for each in errors]
            return NotRun("; ".join(texts)[:1000])
        outputs = tuple((str(each["type"]), each["data"]) for each in data["outputs"])
        session_id = data["session_id"]
    except (KeyError, TypeError, AttributeError):
        session_id = None
    if not isinstance(session_id, str) or not session_id:
        raise HostFailure("expected the service to answer with data or errors, as is documented, got neither")
    return Ran(session_id, outputs)
