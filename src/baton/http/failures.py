"""What can become of a request to a server that did not get its whole response.

In a module of its own since it stays Python in the compiled form of the proxy, which knows no such base class
(scripts/compile_proxy.py).
"""

from __future__ import annotations


class ClientError(ConnectionError):
    """A request that did not get its whole response."""


class ConnectFailed(ClientError):
    """No connection could be made; nothing was sent."""


class OutOfDescriptors(ConnectFailed):
    """This process or this machine has no file descriptor left for a connection; the peer is not to blame."""


class TlsFailed(ConnectFailed):
    """The peer does not speak TLS, or is not who it should be."""


class Broken(ClientError):
    """The peer closed or broke the protocol before its response was whole.

    Attributes:
        began: whether any byte of the response had come.
        reused: whether the connection had served a request before.
    """

    def __init__(self, message: str, *, began: bool, reused: bool) -> None:
        super().__init__(message)
        self.began = began
        self.reused = reused


class TooSlow(ClientError):
    """A deadline passed."""


class TooLate(ClientError):
    """The moment after which a request was not to be sent had passed; nothing was sent."""
