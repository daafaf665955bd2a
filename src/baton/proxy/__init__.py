"""The front door's room: one request's way through prefill, hand-off and decode."""

from baton.proxy.app import Proxy, ProxySettings, serve, serve_workers
from baton.proxy.attempts import Retries
from baton.proxy.breaker import BreakerRules, ProbeRules
from baton.proxy.door import read_keys
from baton.proxy.fleet import Fleet, NoInstance
from baton.proxy.instances_file import BadInstancesFile
from baton.proxy.instances_file import read as read_instances
from baton.proxy.members import is_own
from baton.proxy.routing import POLICIES
from baton.proxy.tracing import TracingUnavailable
from baton.proxy.transfer_policy import OnNoTransfer
from baton.proxy.turns import MOST_TURNS, TTL_SECONDS
from baton.proxy.upstream import USUAL_PATIENCE, Patience

__all__ = [
    "MOST_TURNS",
    "POLICIES",
    "TTL_SECONDS",
    "USUAL_PATIENCE",
    "BadInstancesFile",
    "BreakerRules",
    "Fleet",
    "NoInstance",
    "OnNoTransfer",
    "Patience",
    "ProbeRules",
    "Proxy",
    "ProxySettings",
    "Retries",
    "TracingUnavailable",
    "is_own",
    "read_instances",
    "read_keys",
    "serve",
    "serve_workers",
]
