"""Environments, one folder each; a folder is also a distribution of its own (`openenv-NAME-env`)."""

from pkgutil import extend_path

# Other trees have a package of this name too, the released one's repository for example: both are found.
__path__ = extend_path(__path__, __name__)
