"""Requests generated from the server's OpenAPI document; responses are validated by schemathesis.

FUZZ_EXAMPLES says how many there are for each route; FUZZ_SEED which.
"""

from typing import Any

import httpx
import pytest
from fuzzing import EXAMPLES, SEED
from serve_process import serve

pytestmark = pytest.mark.soak

ROUTES = {
    "GET /health",
    "GET /metadata",
    "GET /schema",
    "GET /state",
    "POST /reset",
    "POST /step",
    "POST /mcp",
    "GET /list_environments",
    "GET /{env_name}/splits",
    "POST /{env_name}/tasks",
    "POST /{env_name}/num_tasks",
    "POST /{env_name}/task",
    "POST /{env_name}/task_range",
}

CHECKS = {
    # Values are read as leniently as the released server reads them: false is the number 0 there.
    "negative_data_rejection": {"enabled": False},
    # 400 is an index that the split does not have.
    "positive_data_acceptance": {"expected-statuses": ["2xx", 400, 404]},
}


def faults_of(url: str, document: dict[str, Any]) -> tuple[set[str], list[str]]:
    """Run every phase; return the routes that were called and the failures."""
    import schemathesis  # takes long, and each worker imports this file
    from schemathesis.config import SchemathesisConfig
    from schemathesis.engine import events, from_schema

    config = SchemathesisConfig.from_dict(
        {
            "seed": SEED,
            "checks": CHECKS,
            "generation": {"max-examples": EXAMPLES, "deterministic": True, "database": "none"},
            "phases": {"coverage": {"unexpected-methods": ["delete"]}},
            "request-timeout": 20,
            "continue-on-failure": True,
        }
    )
    config.projects.default.update(base_url=url)
    routes: set[str] = set()
    faults: list[str] = []
    for event in from_schema(schemathesis.openapi.from_dict(document, config=config)).execute():
        if isinstance(event, events.NonFatalError | events.FatalError):
            faults.append(repr(event))
        elif isinstance(event, events.ScenarioFinished):
            routes.add(event.recorder.label)
            failures = [check.failure_info for checks in event.recorder.checks.values() for check in checks]
            faults += [
                f"{event.recorder.label}: {info.failure.title}\n{info.failure.message}\n{info.code_sample}"
                for info in failures
                if info is not None
            ]
    return routes, faults


@pytest.mark.parametrize("app", ["fuzz_app:app", "fuzz_app:in_threads"])
def test_every_route_answers_as_documented(app: str) -> None:
    with serve("--max-sessions", "100000", "--idle-timeout", "1", app=app) as server:
        url = f"http://{server.address}"
        document = httpx.get(f"{url}/openapi.json", trust_env=False).json()
        routes, faults = faults_of(url, document)
        assert not faults, "\n\n".join(faults[:5])
        assert routes >= ROUTES
        assert server.get("/health") == (200, {"status": "healthy"})
        assert "Traceback" not in server.output
