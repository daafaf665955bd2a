"""The instances, whether each is usable, and what is in flight on each: the only owner of that state."""

from __future__ import annotations

import enum
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.cluster import Endpoint, Role, TransferMode
from baton.http import Header
from baton.proxy.breaker import (
    USUAL_BREAKER,
    USUAL_PROBES,
    Breaker,
    BreakerRules,
    BreakerState,
    ProbeRules,
    Trial,
    Vitals,
)
from baton.proxy.engine_info import EngineInfo, disagreement, same_engine
from baton.proxy.pairs import Pairs

logger = logging.getLogger("baton.proxy")


MOST_IDS = 8
"""Earlier engine ids of an address that are remembered."""


class NoInstance(Exception):
    """No instance of a role is usable."""

    def __init__(self, role: Role, known: int) -> None:
        super().__init__(f"no {role} server is usable ({known} known)")
        self.role = role


class Taken(ValueError):
    """There is an instance at that address already."""


class InstanceState(enum.StrEnum):
    """What an instance is to routing."""

    USABLE = "usable"
    OUT = "out"
    OPEN = "open"
    HALF_OPEN = "half-open"
    DRAINING = "draining"
    DRAINED = "drained"

    @property
    def number(self) -> int:
        """That of the metric ``baton_instance_state``: those of a circuit breaker, and two more."""
        return _NUMBERS[self]


_NUMBERS = {
    InstanceState.USABLE: 0,
    InstanceState.OUT: 1,
    InstanceState.OPEN: 1,
    InstanceState.HALF_OPEN: 2,
    InstanceState.DRAINING: 3,
    InstanceState.DRAINED: 4,
}


class Ejection(enum.StrEnum):
    """Why an instance was taken out."""

    PROBE = "probe"
    CONNECT = "connect"
    FAILURES = "failures"
    TRANSFERS = "transfers"


@dataclass
class ProxyInstance:
    """One engine, and what the proxy knows of it.

    Attributes:
        endpoint: where it is and what it does.
        id: ``P0``, ``D1``: role and number, which is never used again.
        place: its place among its role, which never changes.
        usable: whether it may be chosen: it lives, its breakers are closed and it is not draining. An instance whose
            breaker is half-open is not, and still gets one request at a time (:meth:`Fleet.usable`).
        in_flight: requests on it now.
        booked: requests that count on it, from before their prefill to their end; kept while places are counted.
        outages: how often it went out.
        came_up: how often it became usable: another start has other connections.
        info: what it is, as it said itself; None when nothing is known.
        learned: whether it has been asked what it is since it became usable or showed to be another.
        named: the header by which an answer names it.
        up: whether it answers, by its probes and its connections.
        draining, drained: whether it gets no new work; whether it has none left either.
        leaving: with *draining*: whether it leaves the fleet afterwards.
        filed: whether it came from the file of instances, which may take it away.
        removed: whether it has left the fleet; what is in flight on it goes on.
        breaker: counts its legs.
        hand_offs: opens when it is to blame for hand-offs that failed.
        engine_id: the last that was heard of it, also while *info* is None.
        tells: whether it has said itself what it is, and can be asked again.
        since: when it came into its state, in Unix time.
        last_error: what went wrong on it last, in words; empty when nothing has.
        silent: whether its last probe had no answer: somebody may be there, and stand still.
        probes_failed: so far.
        ejections: how often it was taken out, by reason.
    """

    endpoint: Endpoint
    id: str
    place: int
    usable: bool = False
    in_flight: int = 0
    booked: int = 0
    outages: int = 0
    came_up: int = 0
    info: EngineInfo | None = None
    learned: bool = False
    changed: Callable[[], None] = field(default=lambda: None, repr=False, compare=False)
    on_new_engine: Callable[[ProxyInstance], None] = field(default=lambda _: None, repr=False, compare=False)
    breaker_rules: BreakerRules = field(default=USUAL_BREAKER, repr=False)
    probe_rules: ProbeRules = field(default=USUAL_PROBES, repr=False)
    draining: bool = False
    drained: bool = False
    leaving: bool = False
    filed: bool = False
    removed: bool = False
    engine_id: str | None = None
    tells: bool = False
    last_error: str = ""
    silent: bool = False
    probes_failed: int = 0
    ejections: Counter[Ejection] = field(default_factory=Counter)
    _turn: int = field(default=0, repr=False)
    _heard: deque[str] = field(default_factory=lambda: deque(maxlen=MOST_IDS), repr=False)
    named: Header = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.named = (f"x-baton-{self.endpoint.role}".encode(), self.id.encode())
        self.up = self.usable
        self.since = time.time()
        self.breaker = Breaker(self.breaker_rules)
        self.hand_offs = Breaker(self.breaker_rules)
        self.vitals = Vitals(self.probe_rules)

    # what comes in: probes, connections, legs

    def set_usable(self, usable: bool, why: str, ejection: Ejection = Ejection.PROBE) -> None:
        """It answers, or does not."""
        if usable != self.up:
            self.up = usable
            self.came_up += usable
            if usable:
                # What was counted before is over. It may be another engine: it was asked, or nobody can know.
                self.breaker.reset(time.monotonic())
                self.hand_offs.reset(time.monotonic())
                if self.came_up > 1 and self.engine_id is None:
                    self.on_new_engine(self)
            else:
                self.outages += 1
                self.ejections[ejection] += 1
                self.last_error = why
                # It may come back as another.
                self.info, self.learned = None, False
            self._settle(why)
            self.changed()

    def probed(self, good: bool, why: str, *, certain: bool = False, silent: bool = False) -> None:
        """A probe of it ended.

        Args:
            certain: of a bad one, that nobody is there.
            silent: of a bad one, that there was no answer.
        """
        self.silent = silent
        if not good:
            self.probes_failed += 1
            self.last_error = why
        self.set_usable(self.vitals.good(self.up) if good else self.vitals.bad(self.up, certain), why)

    def unreachable(self, why: str) -> None:
        """A connection for a leg could not be made: it is out at once, and its probes take it in again."""
        self.vitals.bad(self.up, certain=True)
        self.set_usable(False, why, Ejection.CONNECT)

    def leg_good(self) -> None:
        """A leg ended well. To be called when its breaker has counted failures; else it changes nothing."""
        self.breaker.success(time.monotonic())
        self._settle("its breaker is closed again")

    def leg_bad(self, why: str) -> None:
        """A leg failed, and it was not the client's fault."""
        self.last_error = why
        opened = self.breaker.failure(time.monotonic(), why)
        if opened:
            self.ejections[Ejection.FAILURES] += 1
            self._settle(f"its breaker opens: {why}")

    def leg_neither(self) -> None:
        """A leg ended that says nothing of it: a 4xx, or a client that left."""
        self.breaker.neither()
        self.hand_offs.neither()

    def forgive(self) -> None:
        """The leg that failed last was not its fault."""
        if self.breaker.forgive():
            self.ejections[Ejection.FAILURES] -= 1
        self._settle("its breaker is closed again: another instance is to blame")

    def blame(self, why: str) -> None:
        """Hand-offs fail because of it."""
        self.last_error = why
        self.hand_offs.trip(time.monotonic(), why)
        self.ejections[Ejection.TRANSFERS] += 1
        self._settle(f"hand-offs fail because of it: {why}")

    def handed_off(self) -> None:
        """A hand-off of it worked: to be called when *hand_offs* has counted failures."""
        self.hand_offs.success(time.monotonic())
        self._settle("it hands over again")

    def drain(self, draining: bool, *, leaving: bool = False) -> None:
        """No new work for it from now on; or again some."""
        self.draining, self.drained, self.leaving = draining, False, leaving
        self._settle("it is draining" if draining else "it is not drained any more")

    # what goes out

    def admits(self, now: float) -> bool:
        """Whether it may be sent one request to see whether it is well again."""
        if not self.up or self.draining or self.removed:
            return False
        both = (self.breaker, self.hand_offs)
        return all(each.closed() or each.may_try(now) for each in both) and not all(each.closed() for each in both)

    def recovering(self, now: float) -> bool:
        """Whether its time out is over, so that the next request may show it to be well."""
        if not self.up or self.draining or self.removed:
            return False
        return BreakerState.OPEN not in (self.breaker.state(now), self.hand_offs.state(now))

    def try_now(self) -> list[Trial]:
        """It was chosen while it is not usable: that is the trial, of each of its breakers that is not closed."""
        now = time.monotonic()
        tried = [each for each in (self.breaker, self.hand_offs) if not each.closed()]
        for each in tried:
            each.try_now(now)
        return [(each, now) for each in tried]

    def state(self) -> InstanceState:
        now = time.monotonic()
        if self.draining:
            return InstanceState.DRAINED if self.drained else InstanceState.DRAINING
        if not self.up and not self.usable:
            return InstanceState.OUT
        return _STATES[self.cb_state(now)]

    def cb_state(self, now: float) -> BreakerState:
        """Of its two breakers, the state that keeps more out."""
        states = (self.breaker.state(now), self.hand_offs.state(now))
        return next((each for each in (BreakerState.OPEN, BreakerState.HALF_OPEN) if each in states), states[0])

    def set_info(self, info: EngineInfo | None) -> None:
        """It is *info*."""
        if info is not None:
            self.heard(info.engine_id)
        self.info = info
        self.changed()

    def heard(self, engine_id: str) -> None:
        """The engine there has this id: another than before means another engine, and all that was known is void."""
        known, self.engine_id = self.engine_id, engine_id
        if known is None or same_engine(known, engine_id):
            return
        # No id comes back after a restart: there are several engines behind one address.
        returns = any(same_engine(engine_id, each) for each in self._heard)
        if not any(same_engine(known, each) for each in self._heard):
            self._heard.append(known)
        if returns:
            return
        logger.info("%s is another engine now: %s in place of %s", self.id, engine_id, known)
        now = time.monotonic()
        self.breaker.reset(now)
        self.hand_offs.reset(now)
        # Out or not in between: it knows nobody yet.
        self.came_up += self.up
        self._settle("another engine is there now")
        self.on_new_engine(self)

    def hear(self, params: Mapping[str, Any]) -> None:
        """It gave this ticket: when another engine speaks there than was known, it is asked again what it is."""
        engine_id = params.get("remote_engine_id")
        if self.info is not None and self.info.names(engine_id):
            return
        self.learned = self.learned and self.info is None
        self.correct(params)
        if engine_id != self.engine_id and isinstance(engine_id, str) and engine_id:
            self.heard(engine_id)

    def correct(self, params: Mapping[str, Any]) -> None:
        """It, or the one rank of it that can be reached here, is what this ticket of its says."""
        said = EngineInfo.from_ticket(params)
        if said is not None:
            self.set_info(said)

    def doubt(self) -> None:
        """What is known of it may have misled somebody: forget it, and ask again."""
        self.learned = False
        self.set_info(None)

    @property
    def ranks(self) -> int | None:
        """How many data-parallel ranks it has; None when it has not said."""
        return self.info.dp_size if self.info is not None else None

    def next_rank(self) -> int:
        """One of its data-parallel ranks, each in its turn."""
        assert self.info is not None
        self._turn = (self._turn + 1) % self.info.dp_size
        return self._turn

    def _settle(self, why: str) -> None:
        """Find out whether it is usable: something has changed, and *why*."""
        usable = (
            self.up and not self.draining and not self.removed and self.breaker.closed() and self.hand_offs.closed()
        )
        if usable == self.usable:
            return
        level = logging.INFO if usable or self.draining else logging.WARNING
        logger.log(level, "%s is %s: %s", self.id, "usable" if usable else "out", why)
        self.usable = usable
        self.since = time.time()
        self.changed()


_STATES = {
    BreakerState.CLOSED: InstanceState.USABLE,
    BreakerState.OPEN: InstanceState.OPEN,
    BreakerState.HALF_OPEN: InstanceState.HALF_OPEN,
}


class Fleet:
    """All instances by role.

    Args:
        wanted: the transfer mode that the user insists on; None finds it out.
        breaker: when an instance is taken out for what fails on it.
        probes: when it is for its probes.

    Attributes:
        mode: what the usable instances are; read mode while none has said, None when they differ.
        conflict: who differs, in words; None when nobody does.
        pools: the instances of each role, in order of their places. A list is never changed: another takes its place.
        numbers: that the next instance of each role gets.
        held: how many tickets are out whose blocks an instance still holds; whoever keeps count of them sets it.
        on_change: called when an instance has become usable, or is no longer.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        wanted: TransferMode | None = None,
        breaker: BreakerRules = USUAL_BREAKER,
        probes: ProbeRules = USUAL_PROBES,
    ) -> None:
        self._wanted = wanted
        self._breaker_rules = breaker
        self._probe_rules = probes
        self.mode: TransferMode | None = wanted or TransferMode.READ
        self.conflict: str | None = None
        self.pools: dict[Role, list[ProxyInstance]] = {role: [] for role in Role}
        self.pairs = Pairs(breaker)
        self.held: Callable[[ProxyInstance], int] = lambda _: 0
        self.on_change: Callable[[], None] = lambda: None
        self.numbers = dict.fromkeys(Role, 0)
        self._new_engine: list[Callable[[ProxyInstance], None]] = []
        self.on_new_engine(lambda instance: self.pairs.forget(instance.id))
        for endpoint in endpoints:
            self.add(endpoint)

    # instances come and go

    def add(self, endpoint: Endpoint, number: int | None = None) -> ProxyInstance:
        """Take an instance in; it is not usable before it was probed.

        Args:
            number: that it has in another worker of this proxy; None takes the next.

        Raises:
            Taken: there is one at that address.
        """
        taken = self.at(endpoint)
        if taken is not None:
            raise Taken(f"{endpoint.authority} is {taken.id}, a {taken.endpoint.role} server, already")
        role = endpoint.role
        number = self.numbers[role] if number is None else number
        self.numbers[role] = max(self.numbers[role], number + 1)
        instance = ProxyInstance(
            endpoint,
            f"{role.letter}{number}",
            number,
            changed=self._settle,
            on_new_engine=self._on_new_engine,
            breaker_rules=self._breaker_rules,
            probe_rules=self._probe_rules,
        )
        self.pools[role] = sorted([*self.pools[role], instance], key=lambda each: each.place)
        return instance

    def remove(self, instance: ProxyInstance) -> None:
        """Let an instance go: nobody chooses it any more, and what is in flight on it goes on."""
        role = instance.endpoint.role
        self.pools[role] = [each for each in self.pools[role] if each is not instance]
        instance.removed, instance.usable = True, False
        self.pairs.drop(instance.id)
        self._settle()

    def get(self, name: str) -> ProxyInstance | None:
        """The instance with this id."""
        return next((each for each in self if each.id == name), None)

    def at(self, endpoint: Endpoint) -> ProxyInstance | None:
        """The instance at this address, whatever its role."""
        return next((each for each in self if each.endpoint.authority == endpoint.authority), None)

    def on_new_engine(self, callback: Callable[[ProxyInstance], None]) -> None:
        """Have *callback* called when another engine shows at an instance's address: what was known of it is void."""
        self._new_engine.append(callback)

    def _on_new_engine(self, instance: ProxyInstance) -> None:
        for callback in self._new_engine:
            callback(instance)

    # who may be chosen

    def usable(self, role: Role) -> Sequence[ProxyInstance]:
        """The instances of *role* that may be chosen, in order; one that is half-open and due a trial is among them.

        Raises:
            NoInstance: there is none.
        """
        pool = self.pools[role]
        for instance in pool:
            if not instance.usable:
                break
        else:
            if pool:
                return pool
        now = time.monotonic()
        usable = [instance for instance in pool if instance.usable or instance.admits(now)]
        if not usable:
            raise NoInstance(role, len(pool))
        return usable

    def ready(self) -> bool:
        """Whether each role has an instance that is usable, or that the next request may show to be, and they can hand
        over."""
        if self.conflict is not None:
            return False
        now = time.monotonic()
        return all(any(each.usable or each.recovering(now) for each in pool) for pool in self.pools.values())

    # pairs

    def may_pair(self, prefill: ProxyInstance, decode: ProxyInstance) -> bool:
        """Whether the two may hand over, as far as earlier hand-offs between them say."""
        return not self.pairs.bad or self.pairs.may(prefill.id, decode.id, time.monotonic())

    def pair_chosen(self, prefill: ProxyInstance, decode: ProxyInstance) -> list[Trial]:
        """A request is about to be handed over from the one to the other: it may be the trial of the pair."""
        return self.pairs.chosen(prefill.id, decode.id, time.monotonic()) if self.pairs.bad else []

    def pair_worked(self, prefill: ProxyInstance, decode: ProxyInstance) -> None:
        """A decode leg with a ticket of *prefill* succeeded."""
        if self.pairs.bad and not prefill.removed and not decode.removed:
            self.pairs.worked(prefill.id, decode.id, time.monotonic())
        for instance in (prefill, decode):
            if instance.hand_offs.failures:
                instance.handed_off()

    def pair_failed(self, prefill: ProxyInstance, decode: ProxyInstance, why: str) -> None:
        """A decode leg with a ticket of *prefill* failed in a way that may be the transfer's fault.

        The leg has counted it against *decode*; when it turns out to be the fault of *prefill*, that is taken back.
        """
        if prefill.removed or decode.removed:
            return
        verdict = self.pairs.fail(prefill.id, decode.id, time.monotonic(), why)
        on_trial = next((each for each in (prefill, decode) if not each.hand_offs.closed()), None)
        guilty = {prefill.id: prefill, decode.id: decode}.get(verdict.guilty or "", on_trial)
        if verdict.spared or guilty is prefill:
            decode.forgive()
        if guilty is not None:
            guilty.blame(f"{prefill.id} to {decode.id}: {why}")

    def _settle(self) -> None:
        """Find out the transfer mode: an instance has changed."""
        modes = {each.id: each.info.transfer_mode for each in self if each.usable and each.info is not None}
        conflict = disagreement(modes, self._wanted)
        if conflict is not None and conflict != self.conflict:
            logger.error("nothing can be handed over: %s", conflict)
        self.conflict = conflict
        if conflict is not None:
            self.mode = None
        elif self._wanted is not None:
            self.mode = self._wanted
        else:
            self.mode = next(iter(modes.values()), TransferMode.READ)
        self.on_change()

    def __iter__(self) -> Iterator[ProxyInstance]:
        for pool in self.pools.values():
            yield from pool
