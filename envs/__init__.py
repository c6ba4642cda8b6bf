"""Environments, one folder each; a folder is also a distribution of its own (`openenv-NAME-env`)."""
