"""To the client with it: one decode answer as it comes, or several as one."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import orjson

from baton.http import Responder, Response, data_of, split
from baton.proxy.answers import Correction
from baton.proxy.errors import JSON, ProxyError
from baton.proxy.journey import Journey, State, Way
from baton.proxy.passage import Passage
from baton.proxy.samples import Part, Weaver, joined
from baton.proxy.turns import Turn
from baton.proxy.upstream import decoder, passed_headers, read_answer

_DONE = b"data: [DONE]\n\n"


def is_stream(response: Response) -> bool:
    return (response.header(b"content-type") or b"").startswith(b"text/event-stream")


class ToClient:
    """Delivers the one answer of a request.

    An answer in one piece is sent when all of it is here. A stream is begun with its first event, since until then
    another decode server may still take the request over; it passes in callbacks, and a slow client holds the engine
    back.
    """

    def __init__(self, way: Way, responder: Responder) -> None:
        self._way = way
        self._responder = responder

    async def __call__(self, journey: Journey, response: Response, correction: Correction) -> None:
        """
        Raises:
            ProxyError, StreamFailed: the answer is not whole, or says that generation failed; a stream may have begun.
        """
        responder = self._responder
        if not is_stream(response):
            answer = await read_answer(response)
            if responder.started:
                # A comment has promised a stream.
                raise ProxyError(502, "the decode server answered in one piece where a stream was asked for")
            body = correction.whole(answer.body)
            responder.send(200, journey.answer_head(answer.headers), body)
            return

        def begin(run: bytes, /, *, last: bool) -> None:
            begun(journey, self._way)
            if not responder.started:
                responder.start(200, journey.answer_head(passed_headers(response)))
            passage.write = responder.write
            responder.write(run, last=last)

        passage = Passage(begin, correction, journey.rules, self._way.metrics)
        if journey.beat is not None:
            journey.beat.source = passage
        pause = response.pause if journey.turn is None else _held_back(response, journey.turn)
        responder.on_pause, responder.on_resume = pause, response.resume
        if responder.paused:
            pause()
        try:
            await feed(response, passage)
        finally:
            journey.times.first_event = passage.first_at if journey.heard else 0.0
        passage.close()
        responder.end()


def begun(journey: Journey, way: Way) -> None:
    """The client is about to get the first of the answer: the KV cache was moved, and nothing can be tried again."""
    journey.state = State.STREAMING
    journey.heard = True
    if journey.ticket is not None:
        way.outstanding.use(journey.ticket)


def _held_back(response: Response, turn: Turn) -> Callable[[], None]:
    """What holds the engine back, and tells the turn that it is no longer known when the answer ended."""

    def pause() -> None:
        turn.held_back()
        response.pause()

    return pause


async def feed(response: Response, passage: Passage) -> None:
    """Let a stream through to its end.

    Raises:
        Broken: it ended early.
        ProxyError: its content coding is unknown or wrong.
    """
    decode = decoder(response)
    if decode is None:
        await response.feed(passage.take)
        return
    wrong: list[zlib.error] = []

    def take(piece: bytes) -> None:
        if not wrong:
            try:
                passage.take(decode(piece))
            except zlib.error as error:
                wrong.append(error)

    await response.feed(take)
    if wrong:
        raise ProxyError(502, "the engine's answer is not compressed as it says") from wrong[0]


class Joined:
    """Delivers the answers to all parts of a request as one.

    A stream is begun when the decode server of every part has said 200, so that a refusal of any is still the
    client's answer as it is.

    Args:
        made: the parts.
    """

    def __init__(self, way: Way, responder: Responder, journey: Journey, made: Sequence[Part]) -> None:
        self._way = way
        self._responder = responder
        self._journey = journey
        self._made = made
        self._weaver = Weaver(made)
        self._answers: list[dict[str, Any] | None] = [None] * len(made)
        self._streams: list[Response] = []
        self._headed: set[int] = set()
        self._all_heads = asyncio.Event()
        self.last_at = 0.0
        if journey.beat is not None:
            journey.beat.source = self

    async def take(self, place: int, journey: Journey, response: Response, correction: Correction) -> None:
        """The decode server's answer to one part.

        Raises:
            ProxyError, StreamFailed: it is not whole, or says that generation failed.
        """
        self._journey.decode = self._journey.decode or journey.decode
        self._journey.prefill = self._journey.prefill or journey.prefill
        if is_stream(response) is not bool(journey.body.get("stream")):
            # Parts of two kinds would wait for each other.
            raise ProxyError(502, "a decode server answered a part of the request in another way than was asked for")
        if not is_stream(response):
            answer = await read_answer(response)
            self._answers[place] = correction.value(answer.body)
            return
        # Nothing is read on until all have begun; what is here already waits.
        response.pause()
        self._streams.append(response)
        self._headed.add(place)

        def write(run: bytes, /, *, last: bool) -> None:
            if not journey.heard:
                begun(journey, self._way)
            self._write(place, run)

        passage = Passage(write, correction, journey.rules, self._way.metrics)
        try:
            if len(self._headed) == len(self._made):
                self._begin(response)
            await self._all_heads.wait()
            if not self._responder.paused:
                response.resume()
            await feed(response, passage)
            passage.close()
        except BaseException:
            if not journey.heard:
                # Tried again, it has to come to its head again.
                self._headed.discard(place)
            raise
        finally:
            self._streams.remove(response)
        self._journey.times.first_event = self._journey.times.first_event or passage.first_at

    def finish(self) -> None:
        """All parts are there: the end, or the whole answer.

        Raises:
            ProxyError: an answer has no choices to put together.
        """
        if self._responder.started:
            usage = self._weaver.usage()
            if usage is not None:
                self._responder.write(b"data: " + orjson.dumps(usage) + b"\n\n")
            self._responder.write(_DONE)
            self._responder.end()
            return
        answers = [answer for answer in self._answers if answer is not None]
        if len(answers) != len(self._made) or not all(isinstance(each.get("choices"), list) for each in answers):
            raise ProxyError(502, "the decode servers' answers cannot be put together")
        body = orjson.dumps(joined(answers, self._made))
        self._responder.send(200, self._journey.answer_head([JSON]), body)

    def _begin(self, response: Response) -> None:
        responder = self._responder
        if not responder.started:
            responder.start(200, self._journey.answer_head(passed_headers(response)))
        self._journey.state = State.STREAMING
        responder.on_pause, responder.on_resume = self._pause, self._resume
        self._all_heads.set()

    def _pause(self) -> None:
        for response in self._streams:
            response.pause()

    def _resume(self) -> None:
        for response in self._streams:
            response.resume()

    def _write(self, place: int, run: bytes) -> None:
        made: list[bytes] = []
        for event in split(run):
            data = data_of(event)
            if data == b"[DONE]" or not data:
                continue
            try:
                value = self._weaver.event(place, orjson.loads(data))
            except (orjson.JSONDecodeError, AttributeError):
                made.append(event)
                continue
            if value is not None:
                made.append(b"data: " + orjson.dumps(value) + b"\n\n")
        self.last_at = time.monotonic()
        if made:
            self._responder.write(b"".join(made))


async def all_or_none(work: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run all at once; when one fails, cancel the rest and raise what it raised."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
