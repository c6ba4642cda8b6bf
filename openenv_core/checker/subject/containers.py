"""What a running container holds of an environment's folder."""

import io
import tarfile
from typing import TYPE_CHECKING, Final

from openenv_core.checker.outcomes import NotApplicable
from openenv_core.errors import OpenEnvError
from openenv_core.manifest import MANIFEST, Manifest, load_manifest

if TYPE_CHECKING:
    from openenv_core.checker.subject.server import RunningServer

PLACE: Final = f"/app/env/{MANIFEST}"
"""Where images have it: ours, and those of the released package."""


def manifest_in(server: "RunningServer | None") -> Manifest:
    """Read the manifest in a container.

    Raises:
        ManifestError: It says what it cannot say.
        NotApplicable: There is none.
    """
    from openenv_core.providers.docker.engine import Engine

    container = None if server is None else getattr(server.provider, "container", None)
    if container is None:
        raise NotApplicable("there is no container to look into")
    try:
        packed = Engine.find().archive(container.id, PLACE)
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            member = next((one for one in archive if one.isfile()), None)
            file = None if member is None else archive.extractfile(member)
            text = "" if file is None else file.read().decode("utf-8", "replace")
    except (OpenEnvError, tarfile.TarError) as error:
        raise NotApplicable(f"the image has no {PLACE}: {error}") from error
    return load_manifest(text, PLACE)
