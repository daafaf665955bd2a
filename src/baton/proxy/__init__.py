"""The front door's room: one request's way through prefill, hand-off and decode."""

from baton.proxy.app import Proxy, ProxySettings, serve
from baton.proxy.fleet import Fleet, NoInstance
from baton.proxy.routing import POLICIES

__all__ = ["POLICIES", "Fleet", "NoInstance", "Proxy", "ProxySettings", "serve"]
