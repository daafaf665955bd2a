"""How an instance is chosen among usable ones: one file a policy, one small interface."""

from baton.proxy.routing.base import Policy
from baton.proxy.routing.round_robin import RoundRobin

POLICIES: dict[str, type[Policy]] = {"round_robin": RoundRobin}

__all__ = ["POLICIES", "Policy", "RoundRobin"]
