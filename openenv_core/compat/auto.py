"""The released factories of clients and actions by an environment's name. They never install anything."""

import re
from typing import Any

from openenv_core.client import EnvClient, GenericAction, GenericEnvClient, SyncEnvClient
from openenv_core.client.settings import space_label
from openenv_core.errors import ConfigurationError
from openenv_core.making import client_class, make
from openenv_core.types import Action

_SPACE = re.compile(r"(?:https://(?:huggingface\.co|hf\.co)/spaces/)?(?P<id>[\w.-]+/[\w.-]+)/?")


class AutoEnv:
    """Makes a client by an environment's name, or by the id of a Space that runs its server."""

    def __init__(self) -> None:
        raise TypeError(
            f"{type(self).__name__} makes other objects; call {type(self).__name__}.from_env(name)"
        )

    @classmethod
    def from_env(
        cls,
        name: str,
        base_url: str | None = None,
        docker_image: str | None = None,
        *,
        container_provider: Any = None,
        wait_timeout: float = 30.0,
        env_vars: dict[str, str] | None = None,
        trust_remote_code: bool = False,
        skip_install: bool = False,
        **options: Any,
    ) -> SyncEnvClient[Any, Any, Any]:
        """Return a client.

        Args:
            name: Name of an installed environment, `owner/name`, or the URL of a Space.
            base_url: URL of a running server.
            docker_image: Image to run in a container.
            container_provider: Provider of the container.
            wait_timeout: Seconds within which the server must become healthy.
            env_vars: Environment variables of the started server.
            trust_remote_code: Ignored, because no code is downloaded.
            skip_install: Use the generic client, with dicts, instead of the environment's package.
            options: Arguments of the client's constructor.

        Raises:
            ConfigurationError: There is no environment of that name.
        """
        space = _SPACE.fullmatch(name)
        if space is not None:
            base_url = base_url or f"https://{space_label(space['id'])}.hf.space"
            client: type[EnvClient[Any, Any, Any]] = GenericEnvClient
        else:
            client = GenericEnvClient if skip_install else client_class(name)
        if docker_image is not None:
            return client.from_docker_image(
                docker_image,
                provider=container_provider,
                env_vars=env_vars or {},
                start_timeout_s=wait_timeout,
                **options,
            )
        if base_url is not None:
            return make(base_url, client=client, **options)
        return make(name, client=client, env_vars=env_vars, start_timeout_s=wait_timeout, **options)

    from_hub = from_env

    @classmethod
    def get_env_class(cls, name: str) -> type[EnvClient[Any, Any, Any]]:
        """Return the client class of an installed environment."""
        return client_class(name)


class AutoAction:
    """Finds an environment's action class by its name."""

    __init__ = AutoEnv.__init__

    @classmethod
    def from_env(
        cls, name: str, trust_remote_code: bool = False, skip_install: bool = False
    ) -> type[Action] | type[GenericAction]:
        """Return the action class of an installed environment; `GenericAction` for a Space.

        The arguments are those of `AutoEnv.from_env`.

        Raises:
            ConfigurationError: There is no environment of that name, or its client has no action class.
        """
        if skip_install or _SPACE.fullmatch(name):
            return GenericAction
        client = client_class(name)
        action_type: type[Action] | None = getattr(client, "action_type", None)
        if action_type is None:
            raise ConfigurationError(f"expected an action_type of {client.__name__}; set it on the class")
        return action_type

    from_hub = from_env
