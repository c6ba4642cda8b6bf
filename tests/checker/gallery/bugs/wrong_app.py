"""The manifest names an application that is not there: every check that needs one has nothing to look at."""

CAUGHT_BY = "app_importable"
CHANGES = {"openenv.yaml": {"app: server.app:app": "app: server.app:application"}}
ALSO_SKIPPED = {"*"}
