"""Stages an environment's folder as a Space of the Hugging Face hub, and uploads it."""

import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from openenv_core.errors import ConfigurationError, installed_with
from openenv_core.images import base
from openenv_core.images.build import BASE_ARG, PLACES, name_of, read_base, read_dockerfile, variant_for
from openenv_core.images.engine import PushError
from openenv_core.images.ignore_rules import secret_in, walk
from openenv_core.manifest import MANIFEST, read_keys
from openenv_core.targets import PORT

PARTS: Final = "ropewalk-base"
"""The folder of a Space with the files that its base is built from."""

HOSTS: Final = "*.hf.space"
"""The host names of Spaces."""

_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


@dataclass(slots=True)
class StagedSpace:
    """The contents of a Space: file sizes by path, and reasons by path left out."""

    files: dict[str, int]
    left_out: dict[str, str]
    port: int


def check_name(space: str) -> None:
    """Raise a ConfigurationError if this is not a valid name of a Space."""
    if not _NAME.fullmatch(space):
        raise ConfigurationError(f"expected --space OWNER/NAME, got {space!r}")


def stage(folder: Path, destination: Path) -> StagedSpace:
    """Put the files of an environment's Space into an empty folder.

    The Dockerfile is at the root, and the README begins with the hub's metadata. The hub builds the image and does not
    have our base: the Dockerfile builds that first, from files in the Space. Another base is named in the Dockerfile.

    Args:
        folder: The environment's folder.
        destination: An empty folder.

    Raises:
        ConfigurationError: The folder is not an environment, or a file contains what looks like a secret.
    """
    path = next((place for place in PLACES if (folder / place).is_file()), None)
    if path is None or not (folder / MANIFEST).is_file():
        missing = MANIFEST if path is not None else " or ".join(PLACES)
        raise ConfigurationError(f"expected an environment's folder with {missing}, got {folder}")
    text = read_dockerfile(folder / path)
    default = read_base(text)
    try:
        left_out = _copy(folder, destination, {path, "README.md", MANIFEST})
    except PermissionError as error:
        raise ConfigurationError(
            f"expected files that this user can read in {folder}, got: {error}"
        ) from error
    port = _port(folder)
    if (variant := variant_for(default)) is not None:
        text = _with_base(text, variant, destination)
    (destination / path).unlink(missing_ok=True)
    text = (
        f"{text.rstrip()}\n\n# Clients send the Space's name in Host; its visitors see the page to play on.\n"
        f"ENV ROPEWALK_ALLOWED_HOSTS={HOSTS} ENABLE_WEB_INTERFACE=true\n"
    )
    (destination / "Dockerfile").write_text(text, encoding="utf-8")
    _write_readme(folder, destination, port)
    files = {
        path.relative_to(destination).as_posix(): path.stat().st_size
        for path in sorted(destination.rglob("*"))
        if path.is_file()
    }
    return StagedSpace(files, left_out, port)


def with_default(text: str, arg: str, value: str) -> str:
    """Return a Dockerfile with another default of an ARG, wherever it is declared."""
    return re.sub(rf"(?im)^(\s*ARG\s+){arg}(=\S*)?[ \t]*$", lambda match: f"{match[1]}{arg}={value}", text)


def _copy(folder: Path, destination: Path, required: set[str]) -> dict[str, str]:
    """Copy the included files and the `required` ones, even if ignored; return the reasons by path left out."""
    entries = list(walk(folder))
    left_out = {entry.path: entry.reason for entry in entries if entry.reason and entry.path not in required}
    present = {name for name in required if (folder / name).is_file()}
    names = sorted(present | {entry.path for entry in entries if entry.reason is None})
    for name in names:
        target = destination / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / name, target)
    secrets = [name for name in names if secret_in(folder / name)]
    if secrets:
        raise ConfigurationError(
            f"expected files without secrets, got what looks like a token or a private key in {', '.join(secrets)}; "
            "take it out, or name the file in .dockerignore"
        )
    return left_out


def _with_base(text: str, variant: base.Variant, destination: Path) -> str:
    """Return the base's Dockerfile followed by an environment's, and put the base's files into the folder."""
    parts = destination / PARTS
    if parts.exists():
        raise ConfigurationError(f"expected a folder without {PARTS}, from which a Space builds its base")
    with base.context() as request:
        shutil.copytree(request.context, parts)
        requirement = str(request.build_args["ROPEWALK"])
    base_text = (parts / "Dockerfile").read_text(encoding="utf-8")
    (parts / "Dockerfile").unlink()
    if variant is base.Variant.RUNTIME:
        sections = re.split(r"(?m)^(?=# ---- )", base_text)
        base_text = "".join(section for section in sections if f"AS {base.Variant.BUILD}\n" not in section)
    for name, value in (("PARTS", PARTS), ("ROPEWALK", requirement)):
        base_text = with_default(base_text, name, value)
    # The folder is empty if an index provides Ropewalk, and the hub keeps no empty folders.
    if not any((parts / "ropewalk").iterdir()):
        (parts / "ropewalk" / "from-the-index").write_text(f"{requirement}\n", encoding="utf-8")
    with (destination / ".dockerignore").open("a", encoding="utf-8") as ignore:
        ignore.write(f"\n# The files of the base.\n!{PARTS}\n!{PARTS}/**\n")
    used = re.sub(rf"\$(\{{{BASE_ARG}(:-[^}}]*)?\}}|{BASE_ARG}\b)", variant.value, text)
    used = re.sub(rf"(?im)^\s*ARG\s+{BASE_ARG}(=\S*)?[ \t]*\n", "", used)
    # Comments before the first instruction may be directives, which apply to the whole file.
    lines = used.splitlines(keepends=True)
    directives = []
    while lines and re.match(r"#\s*(syntax|escape|check)\s*=", lines[0]):
        directives.append(lines.pop(0))
    return f"{''.join(directives)}{base_text.rstrip()}\n\n# ---- the environment\n{''.join(lines).lstrip()}"


def _port(folder: Path) -> int:
    port = read_keys(folder).get("port", PORT)
    if type(port) is not int:
        raise ConfigurationError(f"expected a number for port in {folder / MANIFEST}, got {port!r}")
    return port


def _write_readme(folder: Path, destination: Path, port: int) -> None:
    """Write the README with the hub's metadata at its top; the author's keys are kept."""
    import yaml

    with installed_with("author", "the hub's library"):
        from huggingface_hub import RepoCard
    path = destination / "README.md"
    try:
        text = path.read_text(encoding="utf-8") if path.is_file() else f"# {name_of(folder)}\n"
    except ValueError as error:
        raise ConfigurationError(f"expected README.md in UTF-8, got: {error}") from error
    try:
        card = RepoCard(text if text.lstrip().startswith("---") else f"---\n\n---\n{text}")
    except (TypeError, ValueError, yaml.YAMLError) as error:
        raise ConfigurationError(
            f"expected keys in YAML between the --- of README.md, got: {error}"
        ) from error
    lines = card.text.splitlines()
    metadata: dict[str, Any] = {
        "title": next((line[2:].strip() for line in lines if line.startswith("# ")), name_of(folder)),
        "emoji": "\N{VIDEO GAME}",
        "colorFrom": "blue",
        "colorTo": "green",
        "tags": ["openenv"],
        "base_path": "/web",
        **vars(card.data),
        # These two are fixed, whatever the author's README says.
        "sdk": "docker",
        "app_port": port,
    }
    header = yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)
    path.write_text(f"---\n{header}---\n\n{card.text.lstrip()}", encoding="utf-8")


def upload(folder: Path, space: str, *, private: bool, endpoint: str | None = None) -> str:
    """Create the Space if it does not exist, replace its files by a folder's, and return its URL.

    Args:
        folder: The new contents of the Space; its other files are removed.
        space: `OWNER/NAME`.
        private: Whether a new Space is private; an existing one is not changed.
        endpoint: The hub's URL; by default the library's (HF_ENDPOINT).

    Raises:
        ConfigurationError: The hub's library is not installed, or the hub does not allow the name.
        PushError: There is no token, or it has no write access; or the hub does not answer.
    """
    with installed_with("author", "the hub's library"):
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    api = HfApi(endpoint=endpoint)
    try:
        space_url: Any = api.create_repo(
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
    except _upload_errors(HfHubHTTPError) as error:
        reason = getattr(error, "server_message", None) or error
        raise PushError(
            f"expected the hub at {api.endpoint} to take {space}, got {type(error).__name__}: {reason}; log in with "
            "`hf auth login`, or set HF_TOKEN, with a token that may write to that owner's Spaces"
        ) from error
    return str(space_url)


def _upload_errors(of_hub: type[Exception]) -> tuple[type[Exception], ...]:
    """Return what the library raises if the hub refuses or does not answer; 2.0 changed its HTTP client.

    A missing token is an OSError.
    """
    clients = (sys.modules.get(name) for name in ("httpx", "httpx2"))
    return (of_hub, OSError, *(client.TransportError for client in clients if client is not None))
