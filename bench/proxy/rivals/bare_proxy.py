"""The floor: a proxy of bare protocols that does next to nothing.

It looks for the end of a message, cuts the ticket out of prefill's answer and puts it in front of the client's body.
One connection a client to each engine, no HTTP parser, nothing checked.

usage: python bench/proxy/rivals/bare_proxy.py PORT PREFILL_PORT DECODE_PORT
"""

from __future__ import annotations

import asyncio
import sys

import uvloop

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"


class Peer(asyncio.Protocol):
    """Gathers one message at a time and gives it to *take*."""

    def __init__(self, take: object) -> None:
        self.take = take
        self.data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.data += data
        at = self.data.find(b"\r\n\r\n")
        if at < 0:
            return
        mark = self.data.find(b"content-length: ", 0, at)
        if mark < 0:
            whole = self.data.startswith(b"GET") or self.data.endswith(b"0\r\n\r\n")
        else:
            whole = len(self.data) >= at + 4 + int(self.data[mark + 16 : self.data.index(b"\r\n", mark)])
        if whole:
            data, self.data = self.data, b""
            self.take(data, at + 4)  # type: ignore[operator]


class Client(Peer):
    """One client, with a connection to each engine."""

    def __init__(self, ports: tuple[int, int]) -> None:
        super().__init__(self.asked)
        self.ports = ports
        self.prefill = Peer(self.prefilled)
        self.decode = Peer(lambda data, _: self.transport.write(data))  # type: ignore[attr-defined]
        self.connected = asyncio.get_running_loop().create_task(self.connect())

    async def connect(self) -> None:
        loop = asyncio.get_running_loop()
        for peer, port in zip((self.prefill, self.decode), self.ports, strict=True):
            await loop.create_connection(lambda peer=peer: peer, "127.0.0.1", port)

    def asked(self, data: bytes, at: int) -> None:
        if data.startswith(b"GET"):
            self.transport.write(OK)  # type: ignore[attr-defined]
            return
        self.body = data[at:]
        if self.connected.done():
            self.send()
        else:
            self.connected.add_done_callback(lambda _: self.send())

    def send(self) -> None:
        self.prefill.transport.write(HEAD % len(self.body) + self.body)  # type: ignore[attr-defined]

    def prefilled(self, data: bytes, at: int) -> None:
        ticket = data[data.index(b'"kv_transfer_params"', at) : -1]
        body = b"{%b, %b" % (ticket, self.body[1:])
        self.decode.transport.write(HEAD % len(body) + body)  # type: ignore[attr-defined]

    def connection_lost(self, exc: Exception | None) -> None:
        for peer in (self.prefill, self.decode):
            if hasattr(peer, "transport"):
                peer.transport.close()


async def main(port: int, prefill: int, decode: int) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Client((prefill, decode)), "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(*map(int, sys.argv[1:4])))
