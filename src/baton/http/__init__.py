"""HTTP/1.1 on asyncio protocols: server, client, pools, server-sent events. Knows nothing of LLMs."""

from baton.http.client import Broken, ClientError, ConnectFailed, Exchange, Origin, Pool, Response, Timeouts, TooSlow
from baton.http.messages import HOP_BY_HOP, Header, Request
from baton.http.server import Limits, Responder, Server

__all__ = [
    "HOP_BY_HOP",
    "Broken",
    "ClientError",
    "ConnectFailed",
    "Exchange",
    "Header",
    "Limits",
    "Origin",
    "Pool",
    "Request",
    "Responder",
    "Response",
    "Server",
    "Timeouts",
    "TooSlow",
]
