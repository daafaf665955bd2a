"""Closed-loop load on one port: each client sends its next request when its last answer is whole.

usage: python bench/proxy/load.py PORT CLIENTS SECONDS json|stream PROMPT_CHARS     prints one line of JSON
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

import uvloop


class Client(asyncio.Protocol):
    """Sends a request, looks for the answer's end, sends the next."""

    def __init__(self, request: bytes, until: float, done: asyncio.Future[None]) -> None:
        self.request, self.until, self.done = request, until, done
        self.first: list[float] = []
        self.whole: list[float] = []
        self.errors = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.send()

    def send(self) -> None:
        self.buffer = b""
        self.sent = time.perf_counter()
        self.began = 0.0
        self.transport.write(self.request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        if not self.began:
            self.began = time.perf_counter()
        self.buffer += data
        if not self.complete():
            return
        if not self.buffer.startswith(b"HTTP/1.1 200"):
            self.errors += 1
        now = time.perf_counter()
        self.first.append(self.began - self.sent)
        self.whole.append(now - self.sent)
        if now < self.until:
            self.send()
        elif not self.done.done():
            self.done.set_result(None)

    def complete(self) -> bool:
        at = self.buffer.find(b"\r\n\r\n")
        if at < 0:
            return False
        head = self.buffer[:at].lower()
        mark = head.find(b"content-length:")
        if mark >= 0:
            return len(self.buffer) >= at + 4 + int(head[mark + 15 :].split(b"\r\n", 1)[0])
        return self.buffer.endswith(b"0\r\n\r\n")

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.errors += 1
            self.done.set_result(None)


async def main(port: int, clients: int, seconds: float, kind: str, chars: int) -> None:
    loop = asyncio.get_running_loop()
    body = json.dumps({"model": "m", "prompt": "x" * chars, "max_tokens": 16, "stream": kind == "stream"}).encode()
    request = (
        b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        b"authorization: Bearer key\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    )
    started = time.perf_counter()
    dones = [loop.create_future() for _ in range(clients)]
    made = [
        (await loop.create_connection(lambda done=done: Client(request, started + seconds, done), "127.0.0.1", port))[1]
        for done in dones
    ]
    await asyncio.gather(*dones)
    spent = time.perf_counter() - started
    first = sorted(value for client in made for value in client.first)
    whole = sorted(value for client in made for value in client.whole)
    print(
        json.dumps(
            {
                "requests_per_s": len(whole) / spent,
                "first_byte_ms_p50": 1e3 * first[len(first) // 2],
                "whole_ms_p99": 1e3 * whole[int(len(whole) * 0.99)],
                "errors": sum(client.errors for client in made),
            }
        )
    )


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4], int(sys.argv[5])))
