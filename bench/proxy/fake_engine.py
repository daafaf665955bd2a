"""A fake engine that is never the bottleneck: raw protocol, answers built once, no HTTP library.

usage: python bench/proxy/fake_engine.py prefill|decode PORT [TOKENS_A_SECOND TOKENS]
Prefill answers JSON with a ticket; decode answers JSON or, to a body with stream true, 16 events in one write; with
a rate, TOKENS events one by one at that rate.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys

import uvloop

TOKENS = 16
_EVENT = {
    "id": "cmpl-1",
    "object": "text_completion",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "text": " word", "logprobs": None, "finish_reason": None}],
}


def whole(body: bytes, kind: bytes = b"application/json") -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (kind, len(body), body)


def event(data: bytes) -> bytes:
    line = b"data: %b\n\n" % data
    return b"%x\r\n%b\r\n" % (len(line), line)


EVENT = event(json.dumps(_EVENT).encode())
HEALTH = whole(b"{}")
UNKNOWN = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"
ANSWER = whole(
    json.dumps(
        {
            **_EVENT,
            "choices": [{"index": 0, "text": " word" * TOKENS, "finish_reason": "length"}],
            "usage": {"prompt_tokens": 9, "completion_tokens": TOKENS},
        }
    ).encode()
)
STREAM = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
    + event(json.dumps(_EVENT).encode()) * TOKENS
    + event(b"[DONE]")
    + b"0\r\n\r\n"
)


HEAD = STREAM[: STREAM.index(b"\r\n\r\n") + 4]


class FakeEngine(asyncio.Protocol):
    role = "decode"
    rate = 0.0
    tokens = TOKENS
    numbers = itertools.count()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.buffer = b""

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (at := self.buffer.find(b"\r\n\r\n")) >= 0:
            head = self.buffer[:at].lower()
            if b"transfer-encoding: chunked" in head:
                end = self.buffer.find(b"\r\n0\r\n\r\n", at)
                if end < 0:
                    return
                body, rest = self.buffer[at:end], end + 7
            else:
                mark = head.find(b"content-length:")
                length = int(head[mark + 15 :].split(b"\r\n", 1)[0]) if mark >= 0 else 0
                rest = at + 4 + length
                if len(self.buffer) < rest:
                    return
                body = self.buffer[at + 4 : rest]
            self.buffer = self.buffer[rest:]
            if self.rate and self.role == "decode" and head.startswith(b"post"):
                asyncio.get_running_loop().create_task(self.drip())
            else:
                self.transport.write(self.answer(head, body))  # type: ignore[attr-defined]

    async def drip(self) -> None:
        transport: asyncio.Transport = self.transport  # type: ignore[assignment]
        transport.write(HEAD)
        for _ in range(self.tokens):
            await asyncio.sleep(1 / self.rate)
            transport.write(EVENT)
        transport.write(event(b"[DONE]") + b"0\r\n\r\n")

    def answer(self, head: bytes, body: bytes) -> bytes:
        if not head.startswith(b"post"):
            return UNKNOWN if head.startswith(b"get /baton/") else HEALTH
        if self.role == "prefill":
            number = next(self.numbers)
            return whole(
                json.dumps(
                    {
                        **_EVENT,
                        "kv_transfer_params": {
                            "do_remote_prefill": True,
                            "do_remote_decode": False,
                            "remote_block_ids": [[number % 997]],
                            "remote_engine_id": "fake",
                            "remote_request_id": f"cmpl-{number}",
                            "remote_host": "127.0.0.1",
                            "remote_port": 5559,
                            "tp_size": 1,
                        },
                    }
                ).encode()
            )
        return STREAM if b'"stream":true' in body or b'"stream": true' in body else ANSWER


async def main(role: str, port: int, rate: float = 0.0, tokens: int = TOKENS) -> None:
    FakeEngine.role, FakeEngine.rate, FakeEngine.tokens = role, rate, tokens
    server = await asyncio.get_running_loop().create_server(FakeEngine, "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], int(sys.argv[2]), *map(float, sys.argv[3:4]), *map(int, sys.argv[4:5])))
