"""Every episode without a name gets the same one."""

CAUGHT_BY = "episode_id"
CHANGES = {"server/environment.py": {"episode_id or str(uuid4())": 'episode_id or "episode"'}}
