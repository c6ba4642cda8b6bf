"""The scenarios that do not pass, one by one, and why. What is not here has to pass; what is here and passes fails."""

from collections.abc import Mapping
from typing import Final, TypeAlias

from conformance_runs import Verdict

Expected: TypeAlias = Mapping[str, tuple[Verdict, str]]

_TASKS = "the extension io.modelcontextprotocol/tasks (SEP-2663), which the SDK does not have"
_SKILLS = "the extension for skills (SEP-2640), which the SDK does not have"
_OLD_POLLING = "this version names 2025-03-26 in its call, and priming events began with 2025-11-25"

_ASKED = "a tool server that asks its user something has nobody to ask: the caller is a policy, and is told an error"
_ACCOUNTS = (
    "OAuth is for people, who sign in with a browser; an environment runs unattended, and its tokens stand in the "
    "`headers` of its `mcpServers`"
)

_MACHINES = (
    "an extension, OAuth between machines; the SDK has some of it, and the `mcpServers` JSON no words for it: a token "
    "in `headers` does instead"
)

SERVER: Final[Mapping[str, Expected]] = {
    "0.1.16": {"server-sse-polling": ("warned", _OLD_POLLING)},
    "2025-03-26": {},
    "2025-06-18": {},
    "2025-11-25": {},
    "2026-07-28": {
        "tasks-lifecycle": ("failed", _TASKS),
        "tasks-capability-negotiation": ("failed", _TASKS),
        "tasks-wire-fields": ("failed", _TASKS),
        "tasks-request-state-removal": ("failed", _TASKS),
        "tasks-mrtr-input": ("failed", _TASKS),
        "tasks-request-headers": ("failed", _TASKS),
        "tasks-dispatch-and-envelope": ("failed", _TASKS),
        "tasks-status-notifications": ("skipped", f"{_TASKS}; the suite itself looks at nothing"),
        "tasks-required-task-error": ("failed", _TASKS),
        "tasks-mrtr-composition": ("failed", _TASKS),
    },
    "extensions": {
        "sep-2640-skills-directory": ("skipped", _SKILLS),
        "sep-2640-skills-enumeration": ("skipped", _SKILLS),
        "sep-2640-skills-manifest": ("skipped", _SKILLS),
    },
}

# Of the client; the suites have these in common.
_BOTH: Final[Expected] = {
    "auth/2025-03-26-oauth-endpoint-fallback": ("failed", _ACCOUNTS),
    "auth/2025-03-26-oauth-metadata-backcompat": ("failed", _ACCOUNTS),
    "auth/basic-cimd": ("failed", _ACCOUNTS),
    "auth/client-credentials-basic": ("failed", _MACHINES),
    "auth/client-credentials-jwt": ("failed", _MACHINES),
    "auth/metadata-default": ("failed", _ACCOUNTS),
    "auth/metadata-var1": ("failed", _ACCOUNTS),
    "auth/metadata-var2": ("failed", _ACCOUNTS),
    "auth/metadata-var3": ("failed", _ACCOUNTS),
    "auth/offline-access-not-supported": ("failed", _ACCOUNTS),
    "auth/offline-access-scope": ("failed", _ACCOUNTS),
    "auth/pre-registration": ("failed", _ACCOUNTS),
    "auth/scope-from-scopes-supported": ("failed", _ACCOUNTS),
    "auth/scope-from-www-authenticate": ("failed", _ACCOUNTS),
    "auth/scope-omitted-when-undefined": ("failed", _ACCOUNTS),
    "auth/scope-retry-limit": ("failed", _ACCOUNTS),
    "auth/scope-step-up": ("failed", _ACCOUNTS),
    "auth/token-endpoint-auth-basic": ("failed", _ACCOUNTS),
    "auth/token-endpoint-auth-none": ("failed", _ACCOUNTS),
    "auth/token-endpoint-auth-post": ("failed", _ACCOUNTS),
    "elicitation-sep1034-client-defaults": ("failed", _ASKED),
}

CLIENT: Final[Mapping[str, Expected]] = {
    "0.1.16": {**_BOTH, "auth/cross-app-access-complete-flow": ("failed", _MACHINES)},
    "next": {
        **_BOTH,
        "auth/authorization-server-migration": ("failed", _ACCOUNTS),
        "auth/dpop": ("failed", _ACCOUNTS),
        "auth/dpop-nonce": ("failed", _ACCOUNTS),
        "auth/enterprise-managed-authorization": ("failed", _MACHINES),
        "auth/iss-normalized": ("failed", _ACCOUNTS),
        "auth/iss-not-advertised": ("failed", _ACCOUNTS),
        "auth/iss-supported": ("failed", _ACCOUNTS),
        "auth/iss-supported-missing": ("failed", _ACCOUNTS),
        "auth/iss-unexpected": ("failed", _ACCOUNTS),
        "auth/iss-wrong-issuer": ("failed", _ACCOUNTS),
        "auth/metadata-issuer-mismatch": ("failed", _ACCOUNTS),
        "auth/resource-mismatch": ("failed", _ACCOUNTS),
        "auth/wif-jwt-bearer": ("failed", _MACHINES),
        "sep-2322-client-request-state": ("failed", _ASKED),
        "sep-2640-client-no-prefetch": ("skipped", _SKILLS),
        "sep-2640-client-verify-digest": ("skipped", _SKILLS),
        "sep-2640-client-verify-frontmatter": ("skipped", _SKILLS),
        "sep-2640-client-verify-size": ("skipped", _SKILLS),
    },
}
