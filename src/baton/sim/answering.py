"""Working on a request and answering it: whole, as events, and badly when a fault says so."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import orjson

from baton.http import Header, Responder
from baton.sim.faults import Kind
from baton.sim.formats import FORMATS, Counts, Format, error_events, with_ticket
from baton.sim.metrics import EngineCounts
from baton.sim.rank import Rank
from baton.sim.requests import GENERATE, Job, Refused
from baton.sim.sequence import GenerationFailed, Owner, Running
from baton.sim.settings import EngineSpec

JSON: Header = (b"content-type", b"application/json")
EVENTS: Header = (b"content-type", b"text/event-stream; charset=utf-8")
_STREAM_FAULTS = (Kind.CUT_STREAM, Kind.HANG_STREAM, Kind.ERROR_EVENT, Kind.CUT)


class AnsweringEngine(Owner, Protocol):
    """What an answer asks of its engine."""

    spec: EngineSpec
    counts: EngineCounts


async def work(
    engine: AnsweringEngine, job: Job, rank: Rank, drawn: Mapping[Kind, float], responder: Responder
) -> None:
    """Work on a request, and answer."""
    running = [
        Running(
            job,
            prompt,
            request_id=job.engine_name(number, sample),
            sample=sample,
            rank=rank,
            engine=engine,
            faults=drawn,
        )
        for number, prompt in enumerate(job.prompts)
        for sample in range(job.samples)
    ]
    made = FORMATS[job.path](job)
    try:
        if job.stream and job.path != GENERATE:
            # The head of a stream comes before its first token.
            responder.start(200, [EVENTS])
        if len(running) == 1:
            await running[0].begin()
        else:
            await begin_all(running)
        if job.stream:
            await _stream(engine, made, running, drawn, responder)
        else:
            await _whole(engine, made, running, drawn, responder)
    except GenerationFailed as failure:
        engine.counts.failed += 1
        if responder.started:
            for each in error_events(job.path):
                responder.write(each)
            responder.end()
        else:
            refused = Refused(str(failure), None, 500, "InternalServerError")
            responder.send(500, [JSON], orjson.dumps(refused.body(job.path)))
    finally:
        for sequence in running:
            sequence.leave()


async def _whole(
    engine: AnsweringEngine, made: Format, running: Sequence[Running], drawn: Mapping[Kind, float], responder: Responder
) -> None:
    for each in running:
        if each.steps:
            await each.rank.step(each.steps)
    if Kind.ERROR_EVENT in drawn:
        raise GenerationFailed
    texts = [each.text for each in running]
    ticket = _finish(running, drawn)
    counts = _count(engine, running)
    body = orjson.dumps(made.whole(texts, counts, ticket))
    if engine.asleep:
        await engine.awake()
    if Kind.CUT in drawn or Kind.CUT_STREAM in drawn:
        lose_tickets(running)
        responder.start(200, [JSON])
        responder.write(body[: len(body) // 2])
        await asyncio.sleep(0)
        responder.abort()
    elif Kind.SPLIT in drawn:
        responder.start(200, [JSON])
        try:
            await write_split(responder, body, int(drawn[Kind.SPLIT]))
        except asyncio.CancelledError:
            lose_tickets(running)
            raise
        responder.end()
    else:
        responder.send(200, [JSON], body)


async def _stream(
    engine: AnsweringEngine, made: Format, running: Sequence[Running], drawn: Mapping[Kind, float], responder: Responder
) -> None:
    if not responder.started:
        responder.start(200, [EVENTS])
    counts = _count(engine, running)
    events = made.start(counts)
    slow = running[0].rank.settings.decode_step_seconds > 0
    limit = next((drawn[kind] for kind in _STREAM_FAULTS if kind in drawn), None)
    for step in range(max(len(each.text.tokens) for each in running)):
        if slow:
            if events:
                responder.write(b"".join(events))
                events = []
            if step or not running[0].computed:
                await running[0].rank.step()
        elif engine.asleep:
            await engine.awake()
        events += step_events(made, running, step)
        if limit is not None and step + 1 >= limit:
            responder.write(b"".join(events))
            await _end_badly(made, drawn, responder)
            return
    ticket = _finish(running, drawn)
    end = made.end([each.text for each in running], counts, ticket)
    if ticket is not None and engine.spec.settings.baton:
        end = with_ticket([events.pop(), *end] if events else end, ticket)
    if Kind.NO_DONE in drawn:
        end = end[:-1]
    data = b"".join([*events, *end])
    if Kind.SPLIT in drawn:
        await write_split(responder, data, int(drawn[Kind.SPLIT]))
    else:
        responder.write(data, last=True)
    responder.end()


async def _end_badly(made: Format, drawn: Mapping[Kind, float], responder: Responder) -> None:
    if Kind.HANG_STREAM in drawn:
        await asyncio.Event().wait()
    elif Kind.ERROR_EVENT in drawn:
        for each in error_events(made.job.path):
            responder.write(each)
        responder.end()
    else:
        # What was written goes out first.
        await asyncio.sleep(0.001)
        responder.abort()


def _finish(running: Sequence[Running], drawn: Mapping[Kind, float]) -> Mapping[str, Any] | None:
    """All sequences have ended; the ticket of the one that ended last."""
    ticket = None
    for each in running:
        ticket = each.finish() or ticket
    if Kind.NO_TICKET in drawn:
        lose_tickets(running)
    return None if Kind.NO_TICKET in drawn else ticket


def _count(engine: AnsweringEngine, running: Sequence[Running]) -> Counts:
    first = running[0]
    counts = Counts(
        sum(each.tokens for each in running[:: first.job.samples]),
        first.cached,
        sum(len(each.text.tokens) for each in running),
    )
    engine.counts.answered(counts, [each.text for each in running], first)
    return counts


async def begin_all(running: Sequence[Running]) -> None:
    """Begin all sequences of a request; the first failure ends the others."""
    tasks = [asyncio.ensure_future(each.begin()) for each in running]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def lose_tickets(running: Sequence[Running]) -> None:
    """The answer does not arrive, and with it the tickets that only it names."""
    for each in running:
        if each.lease is not None:
            each.lease.undelivered = True


def step_events(made: Format, running: Sequence[Running], step: int) -> list[bytes]:
    """The events of one decode step of all sequences of a request."""
    events: list[bytes] = []
    for index, each in enumerate(running):
        tokens = each.text.tokens
        if step == 0:
            events += made.begin(index)
        if step < len(tokens):
            events.append(made.token(index, tokens[step], each.text.finish if step == len(tokens) - 1 else None))
    return events


async def write_split(responder: Responder, data: bytes, size: int) -> None:
    """Write *data* in pieces of *size*, some to a turn of the loop, so that the reader sees them apart."""
    size = max(size, 1)
    for number, start in enumerate(range(0, len(data), size)):
        responder.write(data[start : start + size])
        if number % 64 == 0:
            await asyncio.sleep(0)
