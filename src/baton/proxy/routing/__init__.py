"""How an instance is chosen among usable ones: one file a policy, one small interface."""

from collections.abc import Callable

from baton.proxy.routing.base import Policy
from baton.proxy.routing.least_loaded import LeastLoaded
from baton.proxy.routing.power_of_two import PowerOfTwo
from baton.proxy.routing.random_choice import RandomChoice
from baton.proxy.routing.round_robin import RoundRobin

POLICIES: dict[str, Callable[[], Policy]] = {
    "round_robin": RoundRobin,
    "random": RandomChoice,
    "least_loaded": LeastLoaded,
    "power_of_two": PowerOfTwo,
}

__all__ = ["POLICIES", "LeastLoaded", "Policy", "PowerOfTwo", "RandomChoice", "RoundRobin"]
