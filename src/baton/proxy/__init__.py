"""The front door's room: one request's way through prefill, hand-off and decode."""

from baton.proxy.app import Proxy, ProxySettings, serve, serve_workers
from baton.proxy.door import read_keys
from baton.proxy.fleet import Fleet, NoInstance
from baton.proxy.routing import POLICIES
from baton.proxy.tracing import TracingUnavailable

__all__ = [
    "POLICIES",
    "Fleet",
    "NoInstance",
    "Proxy",
    "ProxySettings",
    "TracingUnavailable",
    "read_keys",
    "serve",
    "serve_workers",
]
