"""The container runs as root."""

CAUGHT_BY = "dockerfile_user"
CHANGES = {"server/Dockerfile": {"\nUSER env\n": "\n"}}
