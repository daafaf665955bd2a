"""One fake engine: an HTTP server that answers as vLLM's, over one or several ranks."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any

import orjson

from baton.http import Limits, Request, Responder, Server
from baton.sim.answering import JSON, work
from baton.sim.fabric import Fabric
from baton.sim.faults import Faults, Kind, Phase
from baton.sim.metrics import EngineCounts, render
from baton.sim.rank import Rank
from baton.sim.requests import GENERATE, PATHS, TICKET_KEY, Refused, base_name, read
from baton.sim.settings import EngineSpec
from baton.sim.text import ids_of, tokens_of, tokens_of_ids

TEXT = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")
VERSION = "0.32.0"
_WITHOUT_LIMITS = Limits(connections=1 << 20, idle_seconds=3600.0)
COMPATIBILITY = {
    "vllm_version": VERSION,
    "nixl_connector_version": "1",
    "dtype": "float32",
    "kv_cache_dtype": "auto",
    "num_kv_heads": 1,
    "head_size": 64,
    "num_layers": 1,
    "hybrid_kv_cache": True,
    "speculative": "none",
}
"""What two engines must have in common to hand over, as Baton's engines say it; but for the model."""


class Engine:
    """A fake engine.

    Args:
        spec: what it is.
        side_port: its side channel; one more for each further rank.
        fabric: where it meets the others.
        faults: what goes wrong.

    Attributes:
        engine_id: new with every start.
        counts: what its metrics say.
        starts: how often it was started.
        load: requests under way.
    """

    def __init__(self, spec: EngineSpec, host: str, side_port: int, fabric: Fabric, faults: Faults) -> None:
        self.spec = spec
        self.host = host
        self.port = spec.port
        self.fabric = fabric
        self.engine_id = ""
        self.counts = EngineCounts()
        self.starts = 0
        self.ranks: list[Rank] = []
        self._faults = faults
        self._side_port = side_port
        self._server: Server | None = None
        self._opening = asyncio.Lock()
        self._next_rank = 0
        self._asleep: asyncio.Future[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._later: set[asyncio.Task[None]] = set()
        self.load = 0

    # life

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    @property
    def asleep(self) -> bool:
        """Whether it stands still, as a process that was sent SIGSTOP."""
        return self._asleep is not None

    @property
    def listening(self) -> bool:
        return self._server is not None

    async def start(self) -> None:
        """Come up as a new engine, on the port that it had.

        Raises:
            OSError: the address cannot be had.
        """
        settings = self.spec.settings
        self.starts += 1
        self.engine_id = _uuid()
        many = settings.dp_size > 1
        self.ranks = [
            Rank(
                settings,
                f"{self.engine_id}_dp{number}" if many else self.engine_id,
                self.host,
                self._side_port + number,
                self.awake,
            )
            for number in range(settings.dp_size)
        ]
        self.fabric.ranks.update({rank.engine_id: rank for rank in self.ranks})
        await self.listen()

    async def listen(self) -> None:
        """Take connections again."""
        async with self._opening:
            if self._server is None:
                server = Server(self._handle, _WITHOUT_LIMITS)
                addresses = await server.listen(self.host, self.port)
                self._server, self.port = server, addresses[0][1]

    def refuse(self) -> None:
        """Take no more connections, and end those that nothing is under way on."""
        server, self._server = self._server, None
        if server is not None:
            task = asyncio.get_running_loop().create_task(server.close(3600.0))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def kill(self, after: float = 0.0) -> None:
        """End, *after* seconds: connections are cut and all that it kept is lost."""
        if after:
            await asyncio.sleep(after)
        self.wake()
        server, self._server = self._server, None
        for rank in self.ranks:
            self.fabric.remove(rank)
        for task in list(self._closing):
            task.cancel()
        if server is not None:
            await server.close(0.0)
        await asyncio.gather(*self._closing, return_exceptions=True)

    async def close(self) -> None:
        """End for good, whatever was to come."""
        for task in list(self._later):
            task.cancel()
        await asyncio.gather(*self._later, return_exceptions=True)
        await self.kill()

    def later(self, work: Coroutine[Any, Any, None]) -> None:
        """Have *work* done on its own, since it cuts whoever asks for it."""
        task = asyncio.get_running_loop().create_task(work)
        self._later.add(task)
        task.add_done_callback(self._later.discard)

    def sleep(self) -> None:
        """Stand still until :meth:`wake`: connections are taken, nothing is answered, nobody's lease is renewed."""
        if self._asleep is None:
            self._asleep = asyncio.get_running_loop().create_future()

    def wake(self) -> None:
        asleep, self._asleep = self._asleep, None
        if asleep is not None and not asleep.done():
            asleep.set_result(None)

    async def awake(self) -> None:
        """Wait while it stands still."""
        while self._asleep is not None:
            await asyncio.shield(self._asleep)

    # answers

    async def _handle(self, request: Request, responder: Responder) -> None:
        if self._asleep is not None:
            await self.awake()
        if request.method == "POST" and request.path in PATHS:
            self.load += 1
            try:
                await self._generate(request, responder)
            finally:
                self.load -= 1
            return
        drawn = self._faults.draw(self.name, Phase.PROBE)
        if drawn and await self._goes_wrong(drawn, responder, request.path, _nobody):
            return
        self._answer(request, responder)

    def _answer(self, request: Request, responder: Responder) -> None:
        """What is no generation."""
        settings = self.spec.settings
        match request.method, request.path:
            case "GET" | "HEAD", "/health" | "/ping":
                responder.send(200, [], b"")
            case "GET", "/v1/models":
                responder.send(200, [JSON], orjson.dumps(models(settings.model, settings.longest)))
            case "GET", "/version":
                responder.send(200, [JSON], orjson.dumps({"version": VERSION}))
            case "GET", "/load":
                responder.send(200, [JSON], orjson.dumps({"server_load": self.load}))
            case "GET", "/metrics":
                responder.send(200, [TEXT], render(self.counts, self.ranks, self.fabric, settings))
            case "GET", "/baton/engine" if settings.baton:
                responder.send(200, [JSON], orjson.dumps(self.about()))
            case "POST", "/tokenize" | "/detokenize":
                responder.send(*self._tokens(request))
            case _, path if path in PATHS or path in ("/health", "/v1/models", "/version", "/metrics", "/load"):
                allow = b"POST" if path in PATHS else b"GET"
                responder.send(405, [JSON, (b"allow", allow)], b'{"detail":"Method Not Allowed"}')
            case _:
                responder.send(404, [JSON], b'{"detail":"Not Found"}')

    def about(self) -> dict[str, Any]:
        """What it says of itself at ``/baton/engine``."""
        settings = self.spec.settings
        if not settings.connector or self._faults.stands(Kind.NO_CONNECTOR, self.name):
            return {"transfer_mode": None}
        return {
            "engine_id": self.engine_id,
            "transfer_mode": "push" if self.ranks[0].pushes else "pull",
            "role": self.spec.role.kv_role,
            "side_channel_host": self.host,
            "side_channel_port": self._side_port,
            "tp_size": 1,
            "pp_size": 1,
            "dp_size": settings.dp_size,
            "block_size": settings.block_size,
            "kv_lease_seconds": settings.lease_seconds,
            "device": "cpu",
            "bidirectional": settings.bidirectional,
            "compatibility": {**COMPATIBILITY, "model": settings.model},
        }

    def _tokens(self, request: Request) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        try:
            body = orjson.loads(request.body)
            if request.path == "/tokenize":
                ids = ids_of(tokens_of(str(body["prompt"])))
                longest = self.spec.settings.longest
                value = {"count": len(ids), "max_model_len": longest, "tokens": ids, "token_strs": None}
            else:
                value = {"prompt": tokens_of_ids(body["tokens"]).rstrip(b"\0").decode(errors="replace")}
        except (orjson.JSONDecodeError, KeyError, TypeError, OverflowError) as error:
            refused = Refused(f"the body cannot be read: {error!r}", "body", kind="Bad Request")
            return 400, [JSON], orjson.dumps(refused.body(request.path))
        return 200, [JSON], orjson.dumps(value)

    def _rank(self, request: Request) -> Rank:
        """Which rank takes a request: the one that it names, else the next."""
        if len(self.ranks) == 1:
            return self.ranks[0]
        said = request.header(b"x-data-parallel-rank")
        if said is not None and said.isdigit() and int(said) < len(self.ranks):
            return self.ranks[int(said)]
        self._next_rank = (self._next_rank + 1) % len(self.ranks)
        return self.ranks[self._next_rank]

    async def _generate(self, request: Request, responder: Responder) -> None:
        path = request.path
        try:
            body = orjson.loads(request.body)
        except orjson.JSONDecodeError as error:
            refused = Refused(f"1 validation error: JSON decode error: {error}", "body", kind="Bad Request")
            responder.send(400, [JSON], orjson.dumps(refused.body(path)))
            return
        ticket = body.get(TICKET_KEY) if isinstance(body, dict) else None
        header = request.header(b"x-request-id")
        said = None if header is None else header.decode("latin-1")
        left = partial(self._left, ticket, path, body, said)
        drawn = self._faults.draw(self.name, phase_of(ticket))
        if drawn and await self._goes_wrong(drawn, responder, path, left):
            return
        try:
            job = read(path, body, said, self.spec.settings)
        except Refused as refused:
            left(refused)
            self.counts.refused += 1
            responder.send(refused.status, [JSON], orjson.dumps(refused.body(path)))
            return
        if job.ticket is not None and self._lacks_connector():
            self.fabric.orphan(job.ticket, base_name(path, body, said))
            job.ticket = None
        await work(self, job, self._rank(request), drawn, responder)

    def _left(self, ticket: Any, path: str, body: Any, said: str | None, refused: Refused | None = None) -> None:
        """A request ends before it was worked on: its client has left, or it is *refused*.

        A decode server tells the prefill server then. Not so when it refuses what its protocol does not know, or at
        the endpoint for tokens, or in write mode, where vLLM names another id (0.32, generate/base/serving.py,
        ``_with_kv_transfer_rejection_cleanup``).
        """
        if not isinstance(ticket, dict) or not ticket.get("do_remote_prefill") or not self.spec.settings.connector:
            return
        if not self.ranks[0].alive:
            self.fabric.orphan(ticket, base_name(path, body, said))
        elif self.ranks[0].pushes:
            if refused is None:
                self.fabric.give_up(ticket, base_name(path, body, said))
        elif refused is None or not (path == GENERATE or refused.kind == "Bad Request" or refused.early):
            self.fabric.release(ticket)

    def _lacks_connector(self) -> bool:
        return bool(self._faults.standing) and self._faults.stands(Kind.NO_CONNECTOR, self.name)

    async def _goes_wrong(
        self, drawn: Mapping[Kind, float], responder: Responder, path: str, left: Callable[..., None]
    ) -> bool:
        """What goes wrong before a request is worked on; whether that was all of it."""
        loop = asyncio.get_running_loop()
        if Kind.STALL in drawn:
            self.sleep()
            loop.call_later(drawn[Kind.STALL], self.wake)
            await self.awake()
        if Kind.KILL in drawn or Kind.RESTART in drawn:
            # Not by this task, which is cut as well.
            again = drawn.get(Kind.RESTART)
            self.later(self.restart(again) if again is not None else self.kill())
            try:
                await asyncio.Event().wait()
            finally:
                left()
        if Kind.FRONT_STATUS in drawn:
            self._say_status(responder, path, int(drawn[Kind.FRONT_STATUS]), "the gateway does not reach the engine")
            return True
        if Kind.RESET in drawn:
            responder.abort(reset=True)
            return True
        try:
            if Kind.HANG in drawn:
                await asyncio.Event().wait()
            if Kind.HANG_AFTER_HEAD in drawn:
                responder.start(200, [JSON])
                await asyncio.Event().wait()
            if Kind.DELAY in drawn:
                await asyncio.sleep(drawn[Kind.DELAY])
        except asyncio.CancelledError:
            left()
            raise
        if Kind.STATUS in drawn:
            left(self._say_status(responder, path, int(drawn[Kind.STATUS]), "a fault that was asked for"))
            return True
        return False

    async def restart(self, seconds: float = 0.0, after: float = 0.0) -> None:
        """End (*after* seconds), stay away for *seconds*, and come up as a new engine on the same port."""
        await self.kill(after)
        if seconds:
            await asyncio.sleep(seconds)
        await self.start()

    def _say_status(self, responder: Responder, path: str, status: int, message: str) -> Refused:
        kind = "InternalServerError" if status >= 500 else "BadRequestError"
        refused = Refused(message, None, status, kind)
        headers = [JSON] if status != 429 else [JSON, (b"retry-after", b"1")]
        responder.send(status, headers, orjson.dumps(refused.body(path)))
        return refused


def _nobody(*_: object) -> None:
    """Who is told when a request ends that holds nothing."""


def phase_of(ticket: Any) -> Phase:
    """What a request is on an engine, by its ticket."""
    if isinstance(ticket, dict):
        if ticket.get("do_remote_prefill"):
            return Phase.DECODE
        if ticket.get("do_remote_decode"):
            return Phase.PREFILL
    return Phase.PLAIN


def models(name: str, longest: int) -> dict[str, Any]:
    """What ``/v1/models`` says."""
    allowed = ("sampling", "logprobs", "view")
    kinds = ("create_engine", "sampling", "logprobs", "search_indices", "view", "fine_tuning")
    permission = {
        "id": "modelperm-sim",
        "object": "model_permission",
        "created": 0,
        **{f"allow_{kind}": kind in allowed for kind in kinds},
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    card = {"id": name, "object": "model", "created": 0, "owned_by": "vllm", "root": name, "parent": None}
    return {"object": "list", "data": [{**card, "max_model_len": longest, "permission": [permission]}]}


def _uuid() -> str:
    text = secrets.token_hex(16)
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))
