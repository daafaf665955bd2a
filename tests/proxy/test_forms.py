"""The proxy in Python and compiled: processes of both, before the same engines, say the same to the byte."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from baton import compiled
from baton.cluster import Role
from tests.ports import free_port
from tests.proxy import fakes
from tests.proxy.fakes import FakeEngine, hang
from tests.wire import corpus

SECONDS = 60.0
FORMS = {"0": "Python", "1": "compiled"}
ROOT = Path(__file__).parents[2]

needs_compiled = pytest.mark.skipif(
    not compiled.is_made(compiled.folder()), reason="nothing is compiled: scripts/compile_proxy.py"
)


@pytest.fixture(autouse=True)
def loop_kind() -> None:
    """The loop of the processes under test is their own: once will do."""


@dataclass
class Form:
    """A proxy in a process of its own, and its engines."""

    process: asyncio.subprocess.Process
    port: int
    engines: list[FakeEngine]

    async def exchange(self, raw: bytes, silence: float = SECONDS) -> bytes:
        """What comes back for *raw* until the proxy closes, or is silent for a while; ids of its own are taken out."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(raw)
        said = b""
        with contextlib.suppress(ConnectionResetError, TimeoutError):
            while True:
                async with asyncio.timeout(silence):
                    piece = await reader.read(65536)
                if not piece:
                    break
                said += piece
        writer.close()
        return unchunked(re.sub(rb"(x-request-id: )[0-9a-f]{32}", rb"\1ID", said))


def unchunked(said: bytes) -> bytes:
    """An answer whose chunks are joined: what one read of the engine's brings is one chunk, and that is chance."""
    head, end, rest = said.partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" not in head.lower():
        return said
    joined = b""
    while (size := int(rest.partition(b"\r\n")[0] or b"0", 16)) > 0:
        start = rest.index(b"\r\n") + 2
        joined, rest = joined + rest[start : start + size], rest[start + size + 2 :]
    return head + end + joined + b"\r\n" + rest


@contextlib.asynccontextmanager
async def form(switch: str, *words: str) -> AsyncIterator[Form]:
    engines = [FakeEngine(role) for role in Role]
    engines[1].ledger = engines[0].ledger
    for engine in engines:
        await engine.start()
        engine.answer = special if engine.role is Role.DECODE else None
    ports = [str(engine.endpoint.port) for engine in engines]
    process = await asyncio.create_subprocess_exec(
        *(
            sys.executable,
            "-m",
            "baton.cli",
            "proxy",
            "--port",
            str(free_port()),
            "--no-warm-up",
            "--on-no-transfer",
            "warn",
        ),
        *("--prefiller-ports", ports[0], "--decoder-ports", ports[1], "--api-key", "k", *words),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, compiled.SWITCH: switch},
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(SECONDS):
            said = (await process.stdout.readline()).decode()
        assert said.startswith(f"baton proxy ({FORMS[switch]}"), said
        port = said.split("listening on ")[1].split(",")[0].rpartition(":")[2]
        yield Form(process, int(port), engines)
        process.terminate()
        async with asyncio.timeout(SECONDS):
            assert await process.wait() == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        for engine in engines:
            assert engine.server is not None
            await engine.server.close()


async def special(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """What the prompt asks for."""
    match body.get("prompt"):
        case "refuse":
            return web.json_response({"error": {"message": "no"}}, status=418, headers={"x-ratelimit-limit": "1"})
        case "fail":
            return web.json_response({"choices": [{"text": "", "finish_reason": "error"}]})
        case "usage":
            usage = {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}
            return web.json_response({"choices": [{"text": "a"}], "usage": usage, "kv_transfer_params": {"a": 1}})
        case "break":
            return await fakes.stream(request, [b"data: 1\n\n"])
        case "split":
            return await fakes.stream(request, [b"data: 1\n", b"\ndata: {", b'"a": 2}\r\n\r', b"\ndata: [DONE]\n\n"])
    return await fakes.decode_answer(engine, request, body)


def post(path: str, body: object, *headers: str) -> bytes:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = ["host: a", "connection: close", "authorization: Bearer k", f"content-length: {len(raw)}", *headers]
    return f"POST {path} HTTP/1.1\r\n".encode() + "\r\n".join(lines).encode() + b"\r\n\r\n" + raw


def get(path: str, *headers: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "host: a", "connection: close", *headers]).encode() + b"\r\n\r\n"


COMPLETIONS = "/v1/completions"
REQUESTS = {
    "json": post(COMPLETIONS, {"prompt": "a", "max_tokens": 4}),
    "stream": post(COMPLETIONS, {"prompt": "a", "stream": True}),
    "chat": post("/v1/chat/completions", {"messages": [{"role": "user", "content": "é"}], "max_completion_tokens": 2}),
    "anthropic": post("/v1/messages", {"messages": [], "max_tokens": 2}),
    "responses": post("/v1/responses", {"input": "a"}),
    "token in": post("/inference/v1/generate", {"token_ids": [1, 2], "sampling_params": {"max_tokens": 3}}),
    "two samples": post(COMPLETIONS, {"prompt": "a", "n": 2}),
    "a list of prompts, streamed": post(COMPLETIONS, {"prompt": ["a"], "stream": True}),
    "echo": post(COMPLETIONS, {"prompt": "a", "echo": True, "max_tokens": 0}),
    "long": post(COMPLETIONS, {"prompt": "x" * 100_000, "kv_transfer_params": {"a": 1}}),
    "own id": post(COMPLETIONS, {"prompt": "a"}, "x-request-id: mine", "traceparent: 00-a-b-01"),
    "another origin": post(COMPLETIONS, {"prompt": "a"}, "origin: https://a.example"),
    "preflight": b"OPTIONS /v1/completions HTTP/1.1\r\nhost: a\r\nconnection: close\r\norigin: https://a.example\r\n"
    b"access-control-request-method: POST\r\n\r\n",
    "no key": get("/v1/models"),
    "models": get("/v1/models", "authorization: Bearer k"),
    "passed on": post("/tokenize", {"prompt": "a"}),
    "health": get("/health"),
    "nothing there": get("/nothing", "authorization: Bearer k"),
    "wrong method": get(COMPLETIONS, "authorization: Bearer k"),
    "HEAD": b"HEAD /health HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n",
    "HTTP/1.0": b"GET /liveness HTTP/1.0\r\n\r\n",
    "no JSON": post(COMPLETIONS, b"{"),
    "no object": post(COMPLETIONS, []),
    "n is none": post(COMPLETIONS, {"prompt": "a", "n": 0}),
    "beam search": post(COMPLETIONS, {"prompt": "a", "use_beam_search": True}),
    "compressed": post(COMPLETIONS, b"x", "content-encoding: gzip"),
    "rank": post(COMPLETIONS, {"prompt": "a"}, "x-data-parallel-rank: x"),
    "refused by the engine": post(COMPLETIONS, {"prompt": "refuse"}),
    "failed by the engine": post(COMPLETIONS, {"prompt": "fail"}),
    "usage": post(COMPLETIONS, {"prompt": "usage"}),
    "a stream that breaks": post(COMPLETIONS, {"prompt": "break", "stream": True}),
    "a stream in pieces": post(COMPLETIONS, {"prompt": "split", "stream": True}),
    "expects": post(COMPLETIONS, {"prompt": "a"}, "expect: 100-continue"),
    "pipelined": get("/liveness").replace(b"connection: close\r\n", b"") + get("/liveness"),
}


@needs_compiled
def test_both_forms_answer_the_same_to_the_byte() -> None:
    async def said(switch: str) -> tuple[dict[str, bytes], list[Any]]:
        async with form(switch, "--cors-allowed-origins", "https://a.example", "--request-timeout-secs", "60") as made:
            answers = {name: await made.exchange(raw) for name, raw in REQUESTS.items()}
            return answers, [(each.paths, each.bodies) for each in made.engines]

    python, native = asyncio.run(said("0")), asyncio.run(said("1"))
    for name, answer in python[0].items():
        assert native[0][name] == answer, name
        assert answer.startswith(b"HTTP/1.1 "), name
    # and asked the same of their engines, but for ids of their own
    assert re.sub(r"resp_[0-9a-f]{32}", "", repr(native[1])) == re.sub(r"resp_[0-9a-f]{32}", "", repr(python[1]))


@needs_compiled
def test_both_forms_judge_odd_messages_alike() -> None:
    async def said(switch: str) -> dict[str, bytes]:
        async with form(switch) as made:
            answers = await asyncio.gather(*(made.exchange(raw, silence=2.0) for raw in corpus.REQUESTS.values()))
            return dict(zip(corpus.REQUESTS, answers, strict=True))

    python, native = asyncio.run(said("0")), asyncio.run(said("1"))
    assert {name for name in python if python[name] != native[name]} == set()


@needs_compiled
@pytest.mark.parametrize("switch", FORMS)
def test_either_form_gives_everything_back_when_clients_leave(switch: str) -> None:
    async def go() -> None:
        async with form(switch) as made:
            made.engines[0].answer = hang
            writers = []
            for stream in (True, False) * 4:
                _, writer = await asyncio.open_connection("127.0.0.1", made.port)
                writer.write(post(COMPLETIONS, {"prompt": "a", "stream": stream}))
                writers.append(writer)
            async with asyncio.timeout(SECONDS):
                while len(made.engines[0].bodies) < 8:
                    await asyncio.sleep(0.01)
                for writer in writers:
                    writer.close()
                while made.engines[0].gone < 8:
                    await asyncio.sleep(0.01)
            metrics = (await made.exchange(get("/metrics"))).decode()
            assert 'baton_requests_total{endpoint="/v1/completions",status="499"} 8.0' in metrics
            assert "baton_active_requests 0.0" in metrics

    asyncio.run(go())


def test_what_was_compiled_of_other_sources_is_not_used(tmp_path: Path) -> None:
    copy = tmp_path / "baton"
    assert subprocess.run(("cp", "-r", str(ROOT / "src" / "baton"), str(copy)), check=True).returncode == 0
    with (copy / "proxy" / "journey.py").open("a") as file:
        file.write("\n# changed\n")
    code = "from baton import compiled; compiled.use(); print(compiled.form()); import baton.proxy.journey as it"
    done = subprocess.run(
        (sys.executable, "-c", f"{code}; print(it.__file__)"),
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    form, file = done.stdout.splitlines()
    assert form.startswith("Python, not compiled")
    assert file == str(copy / "proxy" / "journey.py")


def test_a_switch_turns_it_off_and_a_module_that_is_there_already_too() -> None:
    code = "from baton import compiled; compiled.use(); print(compiled.form())"
    for environ, before, form in (
        ({compiled.SWITCH: "0"}, "", "Python, BATON_COMPILED=0"),
        ({}, "import baton.http; ", "Python"),
    ):
        done = subprocess.run(
            (sys.executable, "-c", before + code),
            env={**os.environ, **environ},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == form
