"""openenv.yaml, and what stands beside it."""

from typing import Final

from openenv_core.checker.check import CheckFailed, Level, NotApplicable, check
from openenv_core.checker.subject import Subject
from openenv_core.manifest import MANIFEST, ManifestError, read_manifest
from openenv_core.tools import RESERVED_TOOL_NAMES

README_WORDS: Final = 12
"""Lines with something on them, below which a README says nothing."""


@check(Level.STATIC)
def check_manifest_present(subject: Subject) -> None:
    """The folder has an openenv.yaml."""
    folder = subject.need_folder()
    if not (folder / MANIFEST).is_file():
        raise CheckFailed(
            f"expected {MANIFEST} in {folder}, got none",
            change=f"add {MANIFEST} with at least spec_version: 1, name, app and port, as `ropewalk init` writes it",
        )


@check(Level.STATIC)
def check_manifest_valid(subject: Subject) -> None:
    """The manifest has the keys and values that it may have, and no others."""
    folder = subject.need_folder()
    if not (folder / MANIFEST).is_file():
        raise NotApplicable("there is no manifest")
    try:
        read_manifest(folder)
    except ManifestError as error:
        raise CheckFailed(
            str(error),
            change=f"correct these keys in {folder / MANIFEST}; docs/validate.md lists them",
        ) from error


@check(Level.STATIC)
def check_manifest_app(subject: Subject) -> None:
    """The manifest's app is a file of the folder."""
    folder, manifest = subject.need_folder(), subject.manifest
    module = manifest.app.partition(":")[0].split(".")
    # Named as others import it, or as it lies in the folder.
    inside = module[module.index(folder.name) + 1 :] if folder.name in module else module
    place = folder.joinpath(*inside)
    if not (place.with_suffix(".py").is_file() or (place / "__init__.py").is_file()):
        raise CheckFailed(
            f"expected {manifest.app!r} to lie in {folder}, got no {'/'.join(inside)}.py there",
            change=f"let `app:` in {MANIFEST} name the module and attribute of the application: server.app:app",
        )


@check(Level.STATIC)
def check_declared_tools(subject: Subject) -> None:
    """No tool that the manifest declares has a name that clients' own methods have."""
    subject.need_folder()
    declared = subject.manifest.validation.capabilities.declared_tools
    if not declared:
        raise NotApplicable("the manifest declares no tools")
    if wrong := sorted(RESERVED_TOOL_NAMES & set(declared)):
        raise CheckFailed(
            f"expected tools with names of their own, got {', '.join(wrong)}",
            change=f"rename them: {', '.join(sorted(RESERVED_TOOL_NAMES))} are what clients call themselves",
        )


@check(Level.STATIC)
def check_readme(subject: Subject) -> None:
    """The folder has a README that says what the environment is."""
    folder = subject.need_folder()
    found = next((file for file in sorted(folder.glob("[Rr][Ee][Aa][Dd][Mm][Ee]*")) if file.is_file()), None)
    if found is None:
        raise CheckFailed(
            f"expected README.md in {folder}, got none",
            change="add one: what an episode is, what actions and observations hold, what is rewarded",
        )
    words = found.read_text(encoding="utf-8", errors="replace").split()
    if len(words) < README_WORDS:
        raise CheckFailed(
            f"expected {found.name} to tell of the environment, got {len(words)} words",
            change="say what an episode is, what actions and observations hold, what is rewarded",
        )
