"""The app, with fallbacks for running inside and outside of the package, as the released scaffold has them."""

from openenv.core.env_server.http_server import create_app

try:
    from ..models import MoodAction, MoodObservation
    from .moody_environment import MoodyEnvironment
except ImportError:
    from models import MoodAction, MoodObservation
    from server.moody_environment import MoodyEnvironment

app = create_app(MoodyEnvironment, MoodAction, MoodObservation, env_name="moody_env", max_concurrent_envs=2)
