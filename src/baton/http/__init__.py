"""HTTP/1.1 on asyncio protocols: server, client, pools. Knows nothing of LLMs."""

from baton.http.client import Exchange, Origin, Pool, Timeouts
from baton.http.client_connection import (
    Broken,
    ClientError,
    ConnectFailed,
    Late,
    OutOfDescriptors,
    Response,
    TlsFailed,
    TooLate,
    TooSlow,
)
from baton.http.events import EventBuffer, data_of, last_of, split, with_data
from baton.http.messages import Header, Request
from baton.http.outbox import Buffer
from baton.http.responder import Responder
from baton.http.rules import Limits
from baton.http.server import Server

__all__ = [
    "Broken",
    "Buffer",
    "ClientError",
    "ConnectFailed",
    "EventBuffer",
    "Exchange",
    "Header",
    "Late",
    "Limits",
    "Origin",
    "OutOfDescriptors",
    "Pool",
    "Request",
    "Responder",
    "Response",
    "Server",
    "Timeouts",
    "TlsFailed",
    "TooLate",
    "TooSlow",
    "data_of",
    "last_of",
    "split",
    "with_data",
]
