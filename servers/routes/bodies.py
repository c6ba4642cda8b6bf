"""Bodies that the framework validates are parsed like all others: bounded in depth, and without NaN."""

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json


class StrictRoute(APIRoute):
    """A route whose body the framework reads and validates: one that is no JSON gets 422, whatever it holds."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler of this route, which sees the strict request."""
        handle = super().get_route_handler()

        async def strict(request: Request) -> Response:
            return await handle(_StrictRequest(request.scope, request.receive))

        return strict


class _StrictRequest(Request):
    async def json(self) -> Any:
        try:
            return from_json(await self.body(), allow_inf_nan=False)
        except ValueError as error:
            raise json.JSONDecodeError(str(error), "", 0) from None
