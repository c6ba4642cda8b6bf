"""Packages that a light installation lacks."""

from openenv_core.errors import ConfigurationError


def needs(package: str, error: ImportError) -> ConfigurationError:
    """Return what tells an author which extra brings an absent package."""
    return ConfigurationError(f"expected the package {package}, got: {error}; pip install 'ropewalk[author]'")
