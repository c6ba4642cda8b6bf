"""The stateless wire: a server cannot ask, so a call ends with questions, and is made again with the answers.

What was answered in earlier rounds travels through the caller, sealed: `RequestStateBoundary` of the SDK binds it to
the method, the tool, the arguments and, by `Seat.binding`, to the session and its owner.
"""

import json
from collections.abc import Mapping
from typing import Any

from openenv_core.tools import Request
from servers.mcp.questions import read_answer, to_mcp


class Rounds:
    """What a call has been answered so far.

    Args:
        state: What the call returned the round before, unsealed; None in the first.
        responses: What the caller answers now.

    Attributes:
        open: The questions that the call ends with; empty where it does not.
    """

    def __init__(self, state: str | None, responses: object) -> None:
        held: dict[str, Any] = {} if state is None else json.loads(state)
        self._answered: list[dict[str, Any]] = held.get("answered", [])
        self._partly: dict[str, Any] = held.get("partly", {})
        self._responses = responses if isinstance(responses, Mapping) else {}
        self._asked = 0
        self.open: dict[str, Request] = {}

    def answers(self, questions: Mapping[str, Request]) -> dict[str, Any] | None:
        """Return the answers to what a tool asks; None where the caller has to be asked first."""
        number, self._asked = self._asked, self._asked + 1
        if number < len(self._answered):
            found = self._answered[number]
        else:
            found = {
                key: answer
                for key, question in questions.items()
                if (answer := self._partly.get(key) or read_answer(question, self._responses.get(key)))
            }
            self._partly, self._responses = {}, {}
        self.open = {key: question for key, question in questions.items() if key not in found}
        if self.open:
            self._partly = found
            del self._answered[number:]
            return None
        if number == len(self._answered):
            self._answered.append(found)
        return {key: found[key] for key in questions}

    def result(self) -> dict[str, Any]:
        """Return the result of a call that ends with questions, in MCP's own JSON."""
        state = {"answered": self._answered, "partly": self._partly}
        return {
            "resultType": "input_required",
            "inputRequests": {key: to_mcp(question) for key, question in self.open.items()},
            "requestState": json.dumps(state),
        }
