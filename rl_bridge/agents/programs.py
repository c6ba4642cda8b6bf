"""Programs that are agents: how each is started, so that it plays one task without a person, and calls nobody else."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

NO_VALUES: Final[Mapping[str, str]] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentProgram:
    """A program that is started for each episode.

    In all texts `{task}`, `{url}` (the gateway's), `{key}`, `{mcp_url}`, `{model}` and `{folder}` stand for those of
    the episode.

    Attributes:
        command: The command and its arguments.
        env: Environment variables, beside PATH, HOME (the episode's folder), TMPDIR and LANG.
        files: Files to write before it starts, by their paths in the episode's folder.
        install: How to get it.
    """

    command: Sequence[str]
    env: Mapping[str, str] = field(default_factory=lambda: NO_VALUES)
    files: Mapping[str, str] = field(default_factory=lambda: NO_VALUES)
    install: str = ""

    def fill(self, values: Mapping[str, str]) -> "AgentProgram":
        """Return the program with an episode's values in place of the names in braces."""
        names = re.compile("|".join(f"{{{name}}}" for name in values))

        def fill(text: str) -> str:
            return names.sub(lambda match: values[match[0][1:-1]], text)

        def fill_file(text: str) -> str:  # in JSON and TOML, within a string
            return names.sub(lambda match: json.dumps(values[match[0][1:-1]])[1:-1], text)

        return AgentProgram(
            command=[fill(part) for part in self.command],
            env={name: fill(value) for name, value in self.env.items()},
            files={name: fill_file(text) for name, text in self.files.items()},
            install=self.install,
        )


_MCP_FILE: Final = """{"mcpServers": {"env": {
  "type": "http", "url": "{mcp_url}", "headers": {"Authorization": "Bearer {key}"}}}}"""

CLAUDE_CODE: Final = AgentProgram(
    command=(
        "claude",
        *("-p", "{task}"),  # headless: one task, then it exits
        "--bare",  # no hooks, plugins, memory or keychain; the API key alone counts
        *("--model", "{model}"),
        *("--mcp-config", "mcp.json", "--strict-mcp-config"),
        *("--tools", ""),  # none of its own: the environment's are all that earn
        *("--allowedTools", "mcp__env"),  # without asking; as root too, unlike --dangerously-skip-permissions
        "--no-session-persistence",
        *("--output-format", "json"),
    ),
    env={
        "ANTHROPIC_BASE_URL": "{url}",
        "ANTHROPIC_API_KEY": "{key}",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": "{model}",  # of side calls
        "CLAUDE_CONFIG_DIR": "{folder}/claude",
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # it would differ from call to call, in the system message
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",  # telemetry, error reports, updates
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_TELEMETRY": "1",
        "DISABLE_ERROR_REPORTING": "1",
        "ENABLE_TOOL_SEARCH": "false",  # all tools are told of at once
        "API_TIMEOUT_MS": "3600000",
        "MCP_CONNECTION_NONBLOCKING": "0",  # else it begins without the environment's tools if they are late
        "MCP_CONNECT_TIMEOUT_MS": "3600000",  # after which it goes on without them
        "MCP_TIMEOUT": "3600000",
        "MCP_TOOL_TIMEOUT": "3600000",
    },
    files={"mcp.json": _MCP_FILE},
    install="get it with `npm i -g @anthropic-ai/claude-code`",
)

_CODEX_FILE: Final = """model = "{model}"
model_provider = "gateway"
approval_policy = "never"
sandbox_mode = "read-only"
check_for_update_on_startup = false
web_search = "disabled"

[model_providers.gateway]
name = "gateway"
base_url = "{url}/v1"
env_key = "GATEWAY_KEY"
wire_api = "responses"
request_max_retries = 2
stream_idle_timeout_ms = 3600000

[mcp_servers.env]
url = "{mcp_url}"
bearer_token_env_var = "GATEWAY_KEY"
required = true
startup_timeout_sec = 3600
tool_timeout_sec = 3600
default_tools_approval_mode = "approve"

[analytics]
enabled = false

[agents]
enabled = false

[features]
shell_tool = false
view_image = false
goals = false
plugins = false
remote_plugin = false
apps = false
"""

CODEX: Final = AgentProgram(
    command=("codex", "exec", "--skip-git-repo-check", "--ephemeral", "--json", "{task}"),
    env={"CODEX_HOME": "{folder}/codex", "GATEWAY_KEY": "{key}"},
    files={"codex/config.toml": _CODEX_FILE},
    install="get it with `npm i -g @openai/codex`",
)

_OPENCODE_FILE: Final = """{
  "$schema": "https://opencode.ai/config.json",
  "model": "gateway/{model}",
  "small_model": "gateway/{model}",
  "autoupdate": false,
  "share": "disabled",
  "provider": {"gateway": {
    "npm": "@ai-sdk/openai-compatible",
    "name": "gateway",
    "options": {"baseURL": "{url}/v1", "apiKey": "{key}"},
    "models": {"{model}": {"name": "{model}", "tool_call": true}}}},
  "mcp": {"env": {
    "type": "remote", "url": "{mcp_url}", "headers": {"Authorization": "Bearer {key}"}, "oauth": false,
    "timeout": 3600000}},
  "tools": {"*": false, "env*": true}
}"""

OPENCODE: Final = AgentProgram(
    command=("opencode", "run", "--pure", "--format", "json", "--title", "task", "{task}"),
    env={
        "OPENCODE_CONFIG": "{folder}/opencode.json",
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
        "npm_config_offline": "true",  # it installs a package for plugins, and goes on without it
        "XDG_DATA_HOME": "{folder}/data",
        "XDG_CONFIG_HOME": "{folder}/config",
        "XDG_CACHE_HOME": "{folder}/cache",
        "XDG_STATE_HOME": "{folder}/state",
    },
    files={"opencode.json": _OPENCODE_FILE},
    install="get it with `npm i -g opencode-ai`",
)

_TOOLS_FILE: Final = '''"""Lists the tools, or calls one: python3 tools.py [NAME 'JSON OF ITS ARGUMENTS']"""
import json
import sys
import urllib.request

params = {"name": sys.argv[1], "arguments": json.loads(sys.argv[2] if sys.argv[2:] else "{}")} if sys.argv[1:] else {}
call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call" if params else "tools/list", "params": params}
headers = {"content-type": "application/json", "authorization": "Bearer {key}"}
reply = json.load(urllib.request.urlopen(urllib.request.Request("{mcp_url}", json.dumps(call).encode(), headers)))
if "error" in reply:
    sys.exit(reply["error"]["message"])
result = reply["result"]
print("\\n".join(part["text"] for part in result["content"]) if params else json.dumps(result["tools"], indent=1))
sys.exit(result.get("isError", False))
'''
"""For agents that have a shell and no MCP."""

_SHELL_TASK: Final = """{task}

The tools for this are called from the shell, in this folder: `python3 tools.py` lists them with their schemas, and
`python3 tools.py NAME 'JSON OF ITS ARGUMENTS'` calls one."""

MINI_SWE_AGENT: Final = AgentProgram(
    command=(
        "mini",
        *("--task", _SHELL_TASK, "--yolo", "--exit-immediately", "--cost-limit", "0"),
        *("--model", "openai/{model}", "--output", "trajectory.json"),
    ),
    env={
        "OPENAI_BASE_URL": "{url}/v1",
        "OPENAI_API_BASE": "{url}/v1",
        "OPENAI_API_KEY": "{key}",
        "MSWEA_CONFIGURED": "true",
        "MSWEA_GLOBAL_CONFIG_DIR": "{folder}/mini",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_SILENT_STARTUP": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    },
    files={"tools.py": _TOOLS_FILE},
    install="get it with `pip install mini-swe-agent`",
)

PRESETS: Final[Mapping[str, AgentProgram]] = MappingProxyType(
    {
        "claude-code": CLAUDE_CODE,
        "codex": CODEX,
        "opencode": OPENCODE,
        "mini-swe-agent": MINI_SWE_AGENT,
    }
)
"""The programs that `rollout.agent.preset` names."""
