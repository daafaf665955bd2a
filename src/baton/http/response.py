"""A response whose head has come, and how its body is awaited."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from baton.http.failures import ClientError
from baton.http.messages import Header, first

if TYPE_CHECKING:
    from baton.http.client_connection import ClientConnection


class Response:
    """A response whose head has come.

    Attributes:
        status: the HTTP status.
        headers: in order, names in lower case.
    """

    __slots__ = ("_connection", "headers", "status")

    def __init__(self, connection: ClientConnection, status: int, headers: list[Header]) -> None:
        self._connection = connection
        self.status = status
        self.headers = headers

    def header(self, name: bytes) -> bytes | None:
        """The first value of *name* (lower case), or None."""
        return first(self.headers, name)

    def watch(self, on_broken: Callable[[ClientError], None]) -> None:
        """Call *on_broken* when it breaks, for who does something else before the body is read."""
        self._connection.watch(on_broken)

    async def read(self) -> bytes:
        """The whole body.

        Raises:
            Broken: it ended early.
            TooSlow: the request's time was over first.
        """
        connection = self._connection
        end = connection.ending()
        if end is not None:
            await end
        return connection.taken()

    async def feed(self, sink: Callable[[bytes], None]) -> None:
        """Call *sink* with each piece of the body as it comes, and return at its end.

        Raises:
            Broken: it ended early; the pieces so far were fed.
            TooSlow: the request's time was over first; likewise.
        """
        connection = self._connection
        try:
            connection.feed(sink)
            end = connection.ending()
            if end is not None:
                await end
        finally:
            connection.feed(None)

    def pause(self) -> None:
        """Read no more from the socket until :meth:`resume`."""
        self._connection.pause()

    def resume(self) -> None:
        self._connection.resume()
