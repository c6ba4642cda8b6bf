"""What a configuration still lacks before a run can begin with it: it may be whole, and wait for its environment."""

from openenv_core.errors import ConfigurationError
from rl_bridge.config.schema import Config
from rl_bridge.errors import ConfigError


def ready_to_train(config: Config) -> None:
    """Refuse one with nothing to learn from, with servers or hosts it says no way to, or with what cannot learn.

    Raises:
        ConfigError: It lacks something; the message lists every fault.
    """
    whys = (_learns_from(config), _asks(config), _reaches(config), config.generator.why_untrainable())
    faults = [fault for fault in whys if fault is not None]
    if faults:
        raise ConfigError("this configuration is not ready to train:\n  " + "\n  ".join(faults))


def _learns_from(config: Config) -> str | None:
    if config.env is not None or config.data is not None:
        return None
    return (
        "expected env.* (an environment to play: env.app, env.image or env.url) or data.* (a dataset of prompts to "
        "answer: data.source), got neither"
    )


def _asks(config: Config) -> str | None:
    from openenv_core.client.settings import (
        websocket_url,  # with the client, which a configuration does without
    )

    urls = None if config.env is None else config.env.url
    for url in (urls,) if isinstance(urls, str) else urls or ():
        try:
            websocket_url(url)
        except ConfigurationError as error:
            return f"env.url: {error}"
    return None


def _reaches(config: Config) -> str | None:
    monarch = config.monarch
    if monarch.num_nodes == 1 or monarch.job is not None or len(monarch.workers) >= monarch.num_nodes:
        return None
    return (
        f"expected monarch.workers with the addresses of {monarch.num_nodes} hosts (monarch.num_nodes), or "
        f"monarch.job, which asks a scheduler for them, got {len(monarch.workers)} addresses; "
        "monarch.num_nodes=1 is this machine alone"
    )
