"""Tickets that nobody will use any more: a decode server is handed each and left at once, so that it tells the prefill
server, which frees the blocks. Nobody else can have them freed before their lease is over."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.cluster import Role
from baton.http import Buffer, ClientError, Header, Response
from baton.proxy import legs
from baton.proxy.answers import ticket_of
from baton.proxy.errors import ProxyError
from baton.proxy.fleet import Fleet, ProxyInstance
from baton.proxy.outstanding import Outstanding
from baton.proxy.ticket import Ticket
from baton.proxy.upstream import Leg, Upstream, plain

logger = logging.getLogger("baton.proxy")

LINGER_SECONDS = 0.5
"""How long a decode server may take to notice a request whose client has left. It must: with the ticket in its
hands it tells the prefill server to free the blocks, also when the request is aborted; nobody else can."""
LATE_SECONDS = 0.5
"""How long a prefill server whose client has left is listened to: its answer may be on its way, with a ticket."""
NO_MODEL = "baton-no-such-model"
"""What a revoked ticket is sent for: see :func:`revocation`."""
REVOKE_PATH = b"/v1/completions"
REACH_SECONDS = 0.5
"""How long the release of a ticket waits for a decode server, before it tries another."""
HEAR_SECONDS = 0.2
"""How long a decode server that is to be left at once is heard: who fails what it is asked fails it soon."""
ROUNDS = 3
"""How often all of them are tried."""


@dataclass(frozen=True, slots=True)
class Errand:
    """What a decode server is sent to have a ticket freed: the decode leg of the ticket's request.

    Attributes:
        headers: of the leg; engines that push find the request by its id.
        body: the leg's with the ticket, given that.
        prefill: whose ticket it would be.
        decode: who is asked first; None for anybody.
        refused: the status that says that it is done, for what is to be refused; None for a leg that is left at once.
    """

    path: bytes
    headers: Sequence[Header]
    body: Callable[[Ticket], Sequence[Buffer]]
    prefill: ProxyInstance
    decode: ProxyInstance | None
    refused: int | None = None


class Releases:
    """The releases under way of one proxy."""

    def __init__(self, fleet: Fleet, upstream: Upstream, outstanding: Outstanding) -> None:
        self._fleet = fleet
        self._upstream = upstream
        self._outstanding = outstanding
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def under_way(self) -> int:
        """Tickets that are being given back."""
        return len(self._tasks)

    def start(self, ticket: Ticket, errand: Errand, but: ProxyInstance | None = None) -> None:
        """Have *ticket*, which no decode server has seen, freed.

        Args:
            but: a decode server that cannot be reached.
        """
        task = asyncio.get_running_loop().create_task(self._release(ticket, errand, but))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def revoke(self, ticket: Ticket, errand: Errand) -> None:
        """Have *ticket* freed, which a decode server may have seen that failed: nobody may read its blocks any more.

        That server is asked first: whatever it still does with the ticket it has given up by then.
        """
        if ticket.pushed:
            # Who pushes knows the request by another id than a refusal would name. Nothing is pushed twice: a leg for
            # what was pushed already waits for nothing, and is left.
            self.start(ticket, errand)
            return
        headers = [(name, b"%b~free" % value if name == b"x-request-id" else value) for name, value in errand.headers]
        self.start(ticket, Errand(REVOKE_PATH, headers, revocation, errand.prefill, errand.decode, refused=404))

    def came_late(self, errand: Errand, response: Response, raw: bytes) -> None:
        """A prefill server has answered though its client had left: it holds blocks if it gave a ticket."""
        try:
            ticket = ticket_of(response.status, plain(response, raw), time.monotonic())
        except ProxyError as error:
            logger.warning("%s answered after it was left, which cannot be read: %s", errand.prefill.id, error)
            return
        if ticket is not None:
            self.unwanted(ticket, errand)

    def unwanted(self, ticket: Ticket, errand: Errand) -> None:
        """A prefill server has just given *ticket*, for which there is no use."""
        self._outstanding.give(ticket, errand.prefill)
        self.start(ticket, errand)

    async def close(self, seconds: float) -> None:
        """Wait for those under way, but no longer than *seconds*."""
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=seconds)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    async def _release(self, ticket: Ticket, errand: Errand, but: ProxyInstance | None) -> None:
        body = errand.body(ticket)
        for _ in range(ROUNDS):
            for instance in in_turn(self._reachable(), errand.decode, but):
                leg = self._upstream.post(
                    instance, errand.path, errand.headers, body, linger_seconds=LINGER_SECONDS, aside=True
                )
                if await told(leg, errand.refused, pushed=ticket.pushed):
                    self._outstanding.drop(ticket)
                    return
        self._outstanding.leave(ticket, errand.prefill)
        logger.warning(
            "no decode server can be reached: %s holds the blocks of a ticket until its lease is over",
            errand.prefill.id,
        )

    def _reachable(self) -> Sequence[ProxyInstance]:
        """Decode servers that answer, those first that requests go to: also one on which requests fail can be told."""
        pool = [each for each in self._fleet.pools[Role.DECODE] if each.up]
        return sorted(pool, key=lambda each: not each.usable)


async def told(leg: Leg, refused: int | None, *, pushed: bool) -> bool:
    """Whether a decode server has been told, by *leg*.

    Args:
        refused: see :class:`Errand`.
        pushed: whether another may be told when this one fails. What is pulled may have been read by one that failed,
            and must not be read again.
    """
    try:
        if refused is None and pushed:
            return await heard(leg)
        async with asyncio.timeout(REACH_SECONDS):
            if refused is None:
                await leg.deliver()
                return True
            async with leg as response:
                await response.read()
                return response.status == refused
    except (ProxyError, ClientError, TimeoutError):
        return False


async def heard(leg: Leg) -> bool:
    """Whether a decode server is at *leg*, and so notices that it is left; unless it, or something before it, fails."""
    try:
        async with asyncio.timeout(HEAR_SECONDS), leg as response:
            return response.status < 400
    except TimeoutError:
        return leg.sent


def revocation(ticket: Ticket) -> Sequence[Buffer]:
    """A request that a decode server refuses before its engine sees it, whereupon it tells the prefill server.

    For a model that is not there. It must be a request that the API understands (vllm 0.32,
    entrypoints/generate/base/serving.py, ``_with_kv_transfer_rejection_cleanup``). Nothing is read, so it does no harm
    for a ticket that was used: the prefill server does not know it any more.
    """
    return legs.decode_body(legs.written({"model": NO_MODEL, "prompt": [0], "max_tokens": 1}), ticket)


def in_turn(
    reachable: Sequence[ProxyInstance], first: ProxyInstance | None, but: ProxyInstance | None
) -> list[ProxyInstance]:
    """The decode servers to try, in order: *first* when it can be reached, then the rest; never *but*."""
    return sorted((each for each in reachable if each is not but), key=lambda each: each is not first)
