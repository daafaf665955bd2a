"""HTTP/1.1 on asyncio protocols: server, client, pools. Knows nothing of LLMs."""

from baton.http.client import Broken, ClientError, ConnectFailed, Exchange, Origin, Pool, Response, Timeouts, TooSlow
from baton.http.messages import Header, Request
from baton.http.server import Limits, Responder, Server

__all__ = [
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
