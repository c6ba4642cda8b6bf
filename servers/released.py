"""What the released package's modules of the server's side hold here; `openenv_core.compat` asks for it. Data only."""

from typing import Final

from openenv_core.compat import Extra

NAMES: Final[Extra] = {
    "openenv.core.env_server.http_server": {
        "create_app": "servers:create_app",
        "create_fastapi_app": "servers:create_fastapi_app",
        "HTTPEnvServer": "servers.http_env_server:HTTPEnvServer",
    }
}
