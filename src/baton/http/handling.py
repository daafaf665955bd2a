"""One request's handler, from its start to its end."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from baton.http.messages import Request
from baton.http.responder import Responder

if TYPE_CHECKING:
    from baton.http.connection import Connection

logger = logging.getLogger("baton.http")


async def handle(connection: Connection, request: Request, responder: Responder) -> None:
    """Run the server's handler; whatever it leaves open is closed here."""
    server = connection.server
    server.busy += 1
    try:
        await server.handler(request, responder)
    except asyncio.CancelledError:
        # The client has left, or the server gives up waiting: nobody reads an answer.
        connection.abort()
    except Exception:
        logger.exception("a handler failed on %s", request.path)
        connection.finish(responder)
    else:
        if not responder.ended:
            logger.error("a handler left %s without a whole answer", request.path)
            connection.finish(responder)
    server.busy -= 1
    connection.done(request)
