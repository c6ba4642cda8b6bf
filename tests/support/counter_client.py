"""The typed client of the counter."""

from counter import Add, Count, CountState

from openenv_core import EnvClient


class CounterEnv(EnvClient[Add, Count, CountState]):
    action_type = Add
    observation_type = Count
    state_type = CountState
    default_app = "counter:app"
