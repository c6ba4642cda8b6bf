"""Uploading a staged folder to the Hugging Face hub."""

import sys
from pathlib import Path
from typing import Any, Final

from openenv_core.errors import ConfigurationError
from openenv_core.images.errors import NotAllowed, NotReached, PushFailed

_FORBIDDEN: Final = (401, 403)
_LOGIN: Final = (
    "log in with `hf auth login`, or set HF_TOKEN, with a token that may write to that owner's Spaces"
)


def upload(folder: Path, space: str, *, private: bool, endpoint: str | None = None) -> str:
    """Make the Space where there is none, replace what it holds by a folder, and return its address.

    Args:
        folder: What the Space will hold; other files of it are removed.
        space: `OWNER/NAME`.
        private: Whether a Space that is made is private; one that is there stays as it is.
        endpoint: The hub; by default the library's own (HF_ENDPOINT).

    Raises:
        ConfigurationError: The hub's library is not installed, or no Space can be called so.
        NotAllowed: There is no token, or it may not write there.
        NotReached: The hub does not answer.
        PushFailed: Something else went wrong on the way.
    """
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError
    except ImportError as error:
        raise ConfigurationError(
            f"expected the hub's library, got: {error}; pip install 'ropewalk[author]'"
        ) from error
    api = HfApi(endpoint=endpoint)
    try:
        made: Any = api.create_repo(
            space, repo_type="space", space_sdk="docker", private=private or None, exist_ok=True
        )
        api.upload_folder(
            repo_id=space,
            folder_path=folder,
            repo_type="space",
            commit_message="ropewalk push",
            delete_patterns="*",
        )
    except HFValidationError as error:
        raise ConfigurationError(f"expected a name that the hub allows, got {space!r}: {error}") from error
    except LocalTokenNotFoundError as error:
        raise NotAllowed(f"expected a token of the hub, got none; {_LOGIN}") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        text = f"expected the hub to take {space}, got {status}: {error.server_message or error}"
        if status in _FORBIDDEN:
            raise NotAllowed(f"{text}; {_LOGIN}") from error
        raise PushFailed(text) from error
    except _silences() as error:
        raise NotReached(
            f"expected the hub at {api.endpoint} to answer, got {type(error).__name__}: {error}; see the network"
        ) from error
    return str(made)


def _silences() -> tuple[type[Exception], ...]:
    """Return what the library raises where nobody answers: its HTTP client's error. Since 2.0 that is another one."""
    clients = (sys.modules.get(name) for name in ("httpx", "httpx2"))
    return (OSError, *(client.TransportError for client in clients if client is not None))
