"""The app; it names its own package as others do."""

from openenv.core.env_server import create_app

from coding_env.models import CodeAction, CodeObservation
from coding_env.server.coding_environment import CodingEnvironment

app = create_app(CodingEnvironment, CodeAction, CodeObservation, env_name="coding_env")
