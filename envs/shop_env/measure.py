"""What the solver and the baselines earn, without a server: `python -m envs.shop_env.measure --tasks 300`."""

from openenv_core.worlds import print_measures

from .baselines import BASELINES
from .server.environment import ShopEnvironment
from .solver import solve

if __name__ == "__main__":
    policies = {"solver": lambda task, call, _: solve(task, call), **BASELINES}
    print_measures(__doc__, ShopEnvironment(), policies)
